"""One hundred times two to four processes start the same run together: exactly one trains.

    python tests/benchmarks/starts.py [--rounds 100] [--seed 0] [--resume] [--json]

The starters are ``fxpart train`` in one process, under its supervisor and under torchrun, and a
script, with random delays. After each round one has trained, in one generation, with each step in
the ledger once; every other has ended with FXP521. Each run is resumed by several rounds, and ends
with the losses, parameters and optimizer state of one that was started alone. Results are written
after each run, and --resume adds rounds to them. Ends with status 1 where anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import parser, resumed, write

_ROUNDS = 5  # of one run


def main() -> None:
    """All rounds; keep what was found."""
    own = parser(__doc__)
    own.add_argument("--rounds", type=int, default=100, help="in total")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--resume", action="store_true", help="add to the results that there are")
    own.add_argument("--json", action="store_true", help="print one line of JSON, keep nothing")
    options = own.parse_args()
    options.dry |= options.json
    import started_together

    empty = {"rounds": 0, "starters": 0, "runs": 0, "trained": {}, "faults": []}
    figures = resumed("starts", options, empty)
    while figures["rounds"] < options.rounds and not figures["faults"]:
        count, seed = min(_ROUNDS, options.rounds - figures["rounds"]), options.seed
        with tempfile.TemporaryDirectory() as folder:
            found = started_together.compare(
                Path(folder), seed=seed + figures["runs"], rounds=count
            )
        figures["rounds"] += sum(found.trained.values())
        figures["starters"] += found.starters
        figures["runs"] += 1
        for kind, number in found.trained.items():
            figures["trained"][kind] = figures["trained"].get(kind, 0) + number
        figures["faults"] += found.faults
        sys.stderr.write(f"{figures['rounds']} rounds, {len(figures['faults'])} faults\n")
        if not options.json:
            write("starts", figures, options)
    if options.json:
        write("starts", figures, options)
    sys.stderr.write("\n".join(figures["faults"]))
    raise SystemExit(1 if figures["faults"] else 0)


if __name__ == "__main__":
    main()
