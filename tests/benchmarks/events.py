"""What it costs to note every action: microseconds of a record, and of an action of a step.

    python tests/benchmarks/events.py [--quick]

A record is timed alone, in memory and in a file. Then a pipeline of four stages trains in one
process: its records over the actions of a step (forwards, backwards, sends), times the seconds of a
record, is what an action costs. It also trains with a ring that writes nothing, in turn; what the
fastest steps differ by says the same where the machine is quiet. All in time of the processor.
Prints a line of JSON.
"""

from __future__ import annotations

import tempfile
import time
import timeit
from pathlib import Path

from record import parser, write

# isort: split
import torch
from hand_stages import batch, language
from runtime_programs import make

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.runtime import InProcess, Trainer
from fxpart.schedule.action import ActionKind

STAGES, MICROBATCHES = 4, 32


class Silent(FlightRecorder):
    """A ring that writes nothing; what calls it stays the same."""

    def write(self, mark: Mark) -> int:
        """Nothing."""
        return 0


def record(ring: FlightRecorder, count: int) -> dict[str, float]:
    """Microseconds of each call, the least of five rounds."""
    mark = ring.mark("0F3", stage=0, microbatch=3)
    calls = {
        "write": lambda: ring.write(mark),
        "put": lambda: ring.put("0F3", stage=0, microbatch=3),
        "last": ring.last,
    }
    return {
        name: 1e6
        * min(timeit.repeat(call, timer=time.process_time, number=count, repeat=5))
        / count
        for name, call in calls.items()
    }


def trainer(ring: FlightRecorder | None) -> Trainer:
    """Of four small stages."""
    import fxpart.runtime.trainer_parts as assembly

    kept = assembly.FlightRecorder
    if ring is not None:
        assembly.FlightRecorder = lambda *_: ring  # type: ignore[assignment, misc]
    try:
        return make(
            language((1, 1, 1, 1)),
            InProcess(STAGES),
            microbatches=MICROBATCHES,
            ranks=range(STAGES),
        )
    finally:
        assembly.FlightRecorder = kept  # type: ignore[misc]


def action(rounds: int, microseconds: float) -> dict[str, float]:
    """Of a step with and without: seconds, and what an action costs. microseconds: of a record."""
    made = {"noted": trainer(None), "silent": trainer(Silent())}
    rows = batch(MICROBATCHES, 5, 0)
    times: dict[str, list[float]] = {name: [] for name in made}
    for at in range(rounds + 5):
        for name, each in made.items():
            start = time.process_time()
            each.step(rows)
            if at >= 5:
                times[name].append(time.process_time() - start)
    engine = made["noted"].parts.engine
    actions = sum(
        instruction.action.kind not in (ActionKind.RECV_F, ActionKind.RECV_B)
        for lanes in engine._executors.values()
        for executors in lanes
        for executor in executors
        for instruction in executor._prepared
    )
    ring = made["noted"].events
    ring.put("here")
    before = ring.events()[-1].number
    made["noted"].step(rows)
    records = ring.events()[-1].number - before
    noted, silent = (min(times[name]) for name in ("noted", "silent"))
    return {
        "noted_seconds": noted,
        "silent_seconds": silent,
        "actions": actions,
        "records": records,
        "microseconds_an_action": microseconds * records / actions,
        "microseconds_an_action_by_difference": 1e6 * (noted - silent) / actions,
    }


def main() -> None:
    """All of it."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    given = options.parse_args()
    torch.set_num_threads(1)
    count, rounds = (20_000, 100) if given.quick else (200_000, 400)
    with tempfile.TemporaryDirectory() as folder:
        file = record(FlightRecorder.create(Path(folder) / "rank-0.ring", 0), count)
    figures = {
        "memory": record(FlightRecorder(), count),
        "file": file,
        "step": action(rounds, file["write"]),
    }
    write("events", figures, given)


if __name__ == "__main__":
    main()
