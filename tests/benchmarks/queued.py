"""Minibatches from queues, as simulated and as real processes take them, by staleness.

    python tests/benchmarks/queued.py            (starts itself under torchrun, up to 4 ranks)

Copies of a stage and what they feed, in processes of one thread. What a computation takes is made:
each forward and backward sleeps for so long, one copy three times as long as the others, so that
the figures are those of the runtime (orders, values, sums and updates between processes) and not of
what else this machine does. simulated: ``fxpart.planner.prediction.queue_simulation`` on those
seconds, before; turns: the same copies in equal turns, as a plan has them that knows nothing of the
slow one. measured: the median of the seconds between updates, once the first minibatches are over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import parser, write

SLOWER = 3.0  # how many times longer the last copy of the first stage with copies takes
# Copies of each stage, seconds of a forward, and the staleness by stage.
CASES: tuple[tuple[tuple[int, ...], float, tuple[tuple[int, ...], ...]], ...] = (
    ((2, 1), 0.02, ((0, 0), (1, 1), (2, 0), (2, 2))),
    ((3, 1), 0.02, ((0, 0), (1, 1), (2, 2))),
    ((1, 2), 0.02, ((0, 0), (1, 1))),
    ((2, 2), 0.02, ((0, 0), (1, 1), (2, 0))),
)
MICROBATCHES = 8
WARM = 6  # minibatches before those that count


def seconds_of(counts: Sequence[int], forward: float) -> dict[int, float]:
    """By copy the seconds of a forward; a stage as a whole takes as long as any other."""
    slow = next(stage for stage, count in enumerate(counts) if count > 1)
    found = [forward * count for count in counts for _ in range(count)]
    found[sum(counts[: slow + 1]) - 1] *= SLOWER
    return dict(enumerate(found))


def plan_of(counts: tuple[int, ...], seconds: Mapping[int, float]) -> Any:
    """A plan of these copies, of which nothing takes time but what is made."""
    import msgspec
    from queued_programs import plan

    made = plan(counts, MICROBATCHES)
    rows = tuple(
        msgspec.structs.replace(
            row, forward_seconds=seconds[row.stage], backward_seconds=2 * seconds[row.stage],
            optimizer_seconds=0.0, overhead_seconds=0.0, sync_seconds=0.0, transfer_seconds=0.0,
            tie_seconds=0.0, gather_seconds=0.0,
        )
        for row in made.prediction.ranks
    )  # fmt: skip
    prediction = msgspec.structs.replace(made.prediction, ranks=rows, hosts=())
    return msgspec.structs.replace(made, prediction=prediction)


def predicted(counts: tuple[int, ...], forward: float, staleness: Sequence[int]) -> dict[str, Any]:
    """The seconds of a minibatch from queues and in turns, and who takes how much."""
    from fxpart.planner.prediction.queue_simulation import (
        compute_round_robin_seconds,
        simulate_queue_plan,
    )

    plan = plan_of(counts, seconds_of(counts, forward))
    run = simulate_queue_plan(plan, staleness)
    return {
        "simulated": run.seconds,
        "turns": compute_round_robin_seconds(plan),
        "taken": list(run.taken.values()),
    }


def measure(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of this rank: it trains, and its computations sleep. Rank 0 says what came of it."""
    from queued_batches import batch
    from queued_programs import plan, program, sgd

    counts = tuple(case["counts"])
    made = program(plan(counts, MICROBATCHES)).trainer(
        sgd, routing="queue", staleness=tuple(case["staleness"])
    )
    seconds = seconds_of(counts, case["forward"])
    for stage, worker in made._workers.items():
        sleeping(worker, seconds[stage])
    ends = []
    for number in range(WARM + case["minibatches"]):
        made.step(batch(16, number))
        ends.append(time.perf_counter())
    made.drain()
    report = made.report()
    made.close()
    if int(os.environ["RANK"]):
        return None
    between = [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
    total = {s: r.microbatches for r in report for s in [r.stage]}
    return {
        # Updates may come in bunches: over all of them.
        "measured": (ends[-1] - ends[WARM - 1]) / len(between),
        "median": statistics.median(between),
        "missed": [r.staleness for r in report],
        "taken": [total[s] / (MICROBATCHES * len(ends)) for s in sorted(total)],
    }


def sleeping(worker: Any, forward: float) -> None:
    """Its computations take so long, a backward twice as long as a forward."""
    for name, seconds in (("_run_forward", forward), ("_run_backward", 2 * forward)):
        inner = getattr(worker, name)

        def lasting(*given: Any, inner: Any = inner, seconds: float = seconds) -> Any:
            start = time.perf_counter()
            found = inner(*given)
            time.sleep(max(0.0, seconds - (time.perf_counter() - start)))
            return found

        setattr(worker, name, lasting)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The case in processes of its own."""
    ranks = sum(case["counts"])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", __file__, "--case", json.dumps(case)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QUEUED_ANSWER": str(answer)}
        subprocess.run(command, env=environment, check=True, timeout=600)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each with its simulation, made before."""
    return [
        {
            "counts": counts,
            "forward": forward,
            "staleness": each,
            "minibatches": options.minibatches,
        }
        for counts, forward, all_of in CASES
        for each in all_of
    ]


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    made = parser(__doc__)
    made.add_argument("--minibatches", type=int, default=16, help="that count, of each case")
    made.add_argument("--case", default="", help="for the processes that it starts")
    options = made.parse_args()
    if options.case:
        found = measure(json.loads(options.case))
        if found is not None:
            Path(os.environ["QUEUED_ANSWER"]).write_text(json.dumps(found), encoding="utf-8")
        return
    rows = []
    for case in cases(options):
        thought = predicted(tuple(case["counts"]), case["forward"], case["staleness"])
        found = run(case)
        shares = {"shares": thought.pop("taken")}
        rows.append({**case, **thought, **shares, **found})
        rows[-1]["error"] = thought["simulated"] / found["measured"] - 1
        say(rows[-1])
    worst = max(abs(row["error"]) for row in rows)
    del options.case
    write("queued", {"rows": rows, "worst": worst}, options)


def say(row: Mapping[str, Any]) -> None:
    """How far it is."""
    sys.stderr.write(
        f"{row['counts']} staleness {row['staleness']}: simulated {row['simulated']:.3f} s,"
        f" measured {row['measured']:.3f} s, in turns {row['turns']:.3f} s\n"
    )


if __name__ == "__main__":
    main()
