"""One hundred kills of launchers, their shells, single ranks and all processes at once.

    python tests/benchmarks/launcher_kills.py [--kills 100] [--seed 0] [--only async] [--resume]

``fxpart train --run`` under a shell, with a synchronous plan, an asynchronous one and queues. No
rank outlives its launcher, no second start trains beside a launcher that has lost its shell, and
the run ends with the losses, parameters and optimizer state of one that was left alone. Results are
written after each run, and --resume adds kills to them. Ends with status 1 where anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import parser, resumed, write


def main() -> None:
    """All plans in turn; keep what was found."""
    own = parser(__doc__)
    own.add_argument("--kills", type=int, default=100)
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--only", default="", help="one plan")
    own.add_argument("--resume", action="store_true", help="add to the results that there are")
    options = own.parse_args()
    import launcher_kills

    plans = [name for name in launcher_kills.PLANS if options.only in ("", name)]
    empty = {"plans": dict.fromkeys(plans, 0), "kills": 0, "runs": 0, "faults": []}
    figures = resumed("launcher_kills", options, empty)
    while figures["kills"] < options.kills and not figures["faults"]:
        plan, seed = plans[figures["runs"] % len(plans)], options.seed + figures["runs"]
        kinds = launcher_kills.KINDS[: options.kills - figures["kills"]]
        with tempfile.TemporaryDirectory() as folder:
            found = launcher_kills.compare(plan, Path(folder), seed=seed, kinds=kinds)
        figures["faults"] += found
        figures["plans"][plan] = figures["plans"].get(plan, 0) + len(kinds)
        figures["kills"] += len(kinds)
        figures["runs"] += 1
        sys.stderr.write(f"{plan}, seed {seed}, {len(found)} faults\n")
        write("launcher_kills", figures, options)
    sys.stderr.write("\n".join(figures["faults"]))
    raise SystemExit(1 if figures["faults"] else 0)


if __name__ == "__main__":
    main()
