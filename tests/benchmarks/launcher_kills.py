"""One hundred kills of launchers, their shells, single ranks and all processes at once.

    python tests/benchmarks/launcher_kills.py [--kills 100] [--seed 0] [--only async]

``fxpart train --run`` under a shell, with a synchronous plan, an asynchronous one and queues. No
rank outlives its launcher, no second start trains beside a launcher that has lost its shell, and
the run ends with the losses, parameters and optimizer state of one that was left alone. Ends with
status 1 where anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import parser, write


def main() -> None:
    """All plans in turn; keep what was found."""
    own = parser(__doc__)
    own.add_argument("--kills", type=int, default=100)
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--only", default="", help="one plan")
    options = own.parse_args()
    import launcher_kills

    plans = [name for name in launcher_kills.PLANS if options.only in ("", name)]
    rows, faults, done, index = dict.fromkeys(plans, 0), [], 0, 0
    while done < options.kills:
        plan, kinds = plans[index % len(plans)], launcher_kills.KINDS[: options.kills - done]
        with tempfile.TemporaryDirectory() as folder:
            seed = options.seed + index
            faults += launcher_kills.compare(plan, Path(folder), seed=seed, kinds=kinds)
        sys.stderr.write(f"{plan}, seed {seed}{', FAULTS' if faults else ''}\n")
        rows[plan] += len(kinds)
        done, index = done + len(kinds), index + 1
    write("launcher_kills", {"plans": rows, "kills": done, "faults": faults}, options)
    sys.stderr.write("\n".join(faults))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
