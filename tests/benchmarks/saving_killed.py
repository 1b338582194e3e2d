"""Kill a process that saves checkpoint after checkpoint, a hundred times, with kill -9.

    python tests/benchmarks/saving_killed.py

Two ranks' files are written by threads of one process, made complete and pruned, without a pause,
until the process is killed at a random moment of a fixed seed. After each kill the newest complete
checkpoint has to be whole, byte for byte what was saved, and not older than the one before. Counted
too: kills that fell into a save, by what they left unfinished.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from record import parser, write


def main() -> None:
    """Kill, look, go on from there."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--kills", type=int, default=100)
    options_parser.add_argument("--seed", type=int, default=8)
    options_parser.add_argument("--quick", action="store_true", help="ten kills")
    options = options_parser.parse_args()
    from checkpoint_files import Sample
    from checkpoint_killed import MOST, killed, left

    from fxpart.checkpoint import folder

    draw, step, loaded, within, back = random.Random(options.seed), 0, 0, 0, 0
    kills = 10 if options.quick else options.kills
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        Sample.make(0, most=MOST).save(root, 0)
        for generation in range(1, kills + 1):
            killed(root, step + 1, generation, 2, draw.uniform(0.0, 0.3))
            within += any(f"-g{generation}-" in path.name for path in folder.list_unfinished(root))
            found = left(root)  # raises where it does not load, or holds other numbers
            loaded += 1
            back += found < step
            step = found
    figures = {
        "kills": kills,
        "newest_loaded": loaded,
        "went_back": back,
        "killed_within_a_save": within,
        "checkpoints_saved": step,
    }
    write("saving_killed", figures, options)
    raise SystemExit(0 if loaded == kills and not back else 1)


if __name__ == "__main__":
    main()
