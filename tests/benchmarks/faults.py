"""Let system calls that write fail, one thousand times, in runs that save and resume.

    python tests/benchmarks/faults.py

A preloaded library fails calls below the run's folder (write, fsync, rename, mkdir, open, unlink,
truncate) with ENOSPC, EIO, EROFS or EDQUOT, or writes half of the data: one call, three, or all
from a random one on. After each, the run has ended as documented: with the right numbers, saved
only if the checkpoint can be read back, or with FXP513 or FXP603. The same run, resumed without
faults, has the right numbers and a ledger without problems.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import parser, write


def main() -> None:
    """Inject faults, and count how the runs end."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--injections", type=int, default=1000)
    options_parser.add_argument("--seed", type=int, default=11)
    options_parser.add_argument("--quick", action="store_true", help="twenty injections")
    options = options_parser.parse_args()
    import fault_injection
    from faulty_runs import run_with_faults

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if not fault_injection.preloaded():
            library = fault_injection.build(Path(tempfile.mkdtemp()))
            if library is None:
                raise SystemExit("there is no C compiler")
            fault_injection.restart(library)
        injections = 20 if options.quick else options.injections
        counts = run_with_faults(root, injections, options.seed)
    figures = {
        "injections": counts.injected,
        "as_documented": counts.injected - counts.ends["wrong"],
        "wrong": len(counts.wrong),
        "ends": dict(sorted(counts.ends.items())),
    }
    for each in counts.wrong[:20]:
        sys.stderr.write(f"{each}\n")
    write("faults", figures, options)
    raise SystemExit(1 if counts.wrong else 0)


if __name__ == "__main__":
    main()
