"""Sixty restarts under torchrun's three rendezvous: each comes back, or says why it cannot.

    python tests/benchmarks/restarts.py [--restarts 60] [--seed 8] [--quick]

Jobs of four ranks. In each, several times, rank 0, two ranks at once or one at random are killed
with kill -9, at random moments while they start, meet or train. A restart has come back when all
four ranks train again. Then one job of which one rank is several times slower, and whose ranks
are stopped for 0.3 seconds 200 times: no alarm. Ends with status 1 if a rank has not come back
within 60 seconds, or if there was an alarm.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from pathlib import Path

from record import parser, write

_RANKS = 4
_IN_A_JOB = 5
_LIMIT = 60.0  # seconds to recover


def main() -> None:
    """Every kind in turn; keep what was found."""
    own = parser(__doc__)
    own.add_argument("--restarts", type=int, default=60)
    own.add_argument("--seed", type=int, default=8)
    own.add_argument("--quick", action="store_true", help="two of each kind")
    options = own.parse_args()
    from supervised_jobs import KINDS

    kinds = [kind for kind in KINDS if kind != "own"]
    each = 2 if options.quick else -(-options.restarts // len(kinds))
    rows, faults = {}, []
    for kind in kinds:
        seconds: list[float] = []
        draw = random.Random(f"{options.seed} {kind}")
        while len(seconds) < each and not faults:
            with tempfile.TemporaryDirectory() as folder:
                count = min(_IN_A_JOB, each - len(seconds))
                seconds += restarted(kind, Path(folder), count, draw, faults)
        rows[kind] = {"restarts": len(seconds), "slowest": max(seconds, default=0.0)}
    pauses = 10 if options.quick else 200
    alarms = paused(pauses)
    figures = {"ranks": _RANKS, "kinds": rows, "pauses": pauses, "alarms": alarms}
    faults += alarms
    write("restarts", {**figures, "faults": faults}, options)
    raise SystemExit(1 if faults else 0)


def restarted(
    kind: str, folder: Path, count: int, draw: random.Random, faults: list[str]
) -> list[float]:
    """Seconds that each of ``count`` restarts took, from the kill until all ranks train."""
    from supervised_jobs import supervised

    found = []
    with supervised(kind, folder, ranks=_RANKS, restarts=count, timeout=30.0) as run:
        run.trains(0)
        for turn in range(count):
            ranks = draw.choice(([0], draw.sample(range(_RANKS), 2), [draw.randrange(_RANKS)]))
            if turn % 2:  # not yet training: starting, meeting, connecting
                pids = run.pids(turn)
                time.sleep(draw.uniform(0.0, 2.0))
            else:
                run.trains(turn)
                pids = run.pids(turn)
            began = time.monotonic()
            run.kill([pids[rank] for rank in ranks])
            try:
                if turn % 2 == 0 and turn + 1 < count:
                    run.pids(turn + 1, _LIMIT)  # is killed again before it trains
                else:
                    run.trains(turn + 1, _LIMIT)
            except AssertionError as fault:
                said = (folder / "stderr").read_text()[-2000:]
                faults.append(json.dumps([kind, turn, ranks, str(fault), said]))
                return found
            found.append(round(time.monotonic() - began, 2))
        if run.end(_LIMIT) != 0:
            faults.append(json.dumps([kind, "the end", (folder / "stderr").read_text()[-2000:]]))
    return found


def paused(count: int) -> list[str]:
    """What ranks said that they failed with, though they were only stopped for moments."""
    from watched_jobs import job, read

    with tempfile.TemporaryDirectory() as name, job(Path(name), _RANKS, 4.0, slow=3) as run:
        run.reach(3)
        for turn in range(count):
            run.signal(turn % _RANKS, signal.SIGSTOP)
            time.sleep(0.3)
            run.signal(turn % _RANKS, signal.SIGCONT)
            time.sleep(0.05)
        try:
            run.reach(run.step() + 3)
        except AssertionError as fault:
            return [str(fault)]
        return [read(file) for file in Path(name).glob("error-*")]


if __name__ == "__main__":
    main()
