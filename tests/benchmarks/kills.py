"""Two hundred random kill -9 of ranks: every run ends with the numbers of one left alone.

    python tests/benchmarks/kills.py [--kills 200] [--seed 0] [--only gpt-pipeline4-sync] [--aimed]

Two models, a pipeline of 4 and one of 2 with data parallelism of 2, synchronous and asynchronous,
under torchrun. One rank or two at once, rank 0 too; while they start, meet, read the checkpoint,
step and save. Losses, samples, final parameters and optimizer state are compared to the bit. Ends
with status 1 where anything differs. Every second round (with --aimed, each) has kills before, in
and after a checkpoint's rename, an append to the ledger and an exchange of the ranks, and of all
ranks at once.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from record import parser, write

_AT_ONCE = 5  # kills in one run


def main() -> None:
    """All cases in turn; print the seeds, and keep what was found."""
    own = parser(__doc__)
    own.add_argument("--kills", type=int, default=200)
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--only", default="", help="one case")
    own.add_argument("--aimed", action="store_true")
    options = own.parse_args()
    import chaos_kills as chaos
    from chaos_programs import CASES

    cases = [name for name in CASES if options.only in ("", name)]
    rows, faults, seconds = {name: {"runs": 0, "kills": 0} for name in cases}, [], []
    done = index = 0
    while done < options.kills:
        case, seed = cases[index % len(cases)], options.seed + index
        with tempfile.TemporaryDirectory() as folder:
            count = min(_AT_ONCE, options.kills - done)
            aimed = options.aimed or index // len(cases) % 2
            moments = chaos.AIMED if aimed else chaos.MOMENTS
            found = chaos.compare(case, Path(folder), seed=seed, kills=count, moments=moments)
            faults += found.faults()
        made = len(found.shot.killed)
        sys.stderr.write(
            f"{case}, seed {seed}: {made} kills, {found.shot.seconds:.0f} s, "
            f"{found.calm.seconds:.0f} s alone{'' if not faults else ', FAULTS'}\n"
        )
        rows[case]["runs"] += 1
        rows[case]["kills"] += made
        seconds.append((found.shot.seconds - found.calm.seconds) / max(made, 1))
        done, index = done + max(made, 1), index + 1
    figures = {
        "cases": rows,
        "kills": sum(row["kills"] for row in rows.values()),
        "seconds_per_kill": round(statistics.median(seconds), 1),
        "faults": faults,
    }
    write("kills", figures, options)
    sys.stderr.write("\n".join(faults))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
