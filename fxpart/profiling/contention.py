"""Measure CPU contention: the slowdown of a model's microbatch in concurrent processes of a host.

Each process runs forward and backward of its own copy of the model for the same time: first one
process, then two, up to the ranks of the host. This is repeated, as other load changes within
seconds. With more ranks than cores, it measures how the operating system shares cores. The times of
single rounds then vary, so the number of completed rounds is the measure. The model is passed as an
exported program, so that processes do not need the user's code.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.cluster.host_detection import cores
from fxpart.costmodels.profile_store import ContentionProfile
from fxpart.profiling.arrival_skew import measure_arrival_skew
from fxpart.profiling.cpu_load_imbalance import measure_load_imbalance
from fxpart.profiling.memory import ProcessMemoryGrowth, growth
from fxpart.profiling.processes import run_on_processes
from fxpart.profiling.runtime_overhead import overhead
from fxpart.profiling.stage_run import StageRun, Values
from fxpart.profiling.token_ring import (
    PIECE,
    ComputeLoad,
    agree_on_products,
    ring,
    time_concurrent_compute,
)
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.transport.interface import Transport
from fxpart.runtime.transport.process_group import connect

_ROUNDS = 24  # Computations of each rank in a ring.
_MOST = 0.05  # Upper limit in seconds; a longer wait has another cause.

MOST = 8  # Ranks measured at the same time.
_TIME_TARGET = "fxpart.profiling.contention:work"
_MEMORY_TARGET = "fxpart.profiling.contention:measure_memory"
_INPUTS, _LARGE = "inputs.safetensors", "large.safetensors"
_EXCHANGED = 1 << 22  # Elements of a tensor that is sent back and forth: 16 MiB.
_MEMORY_PROCESSES = 2  # Processes whose memory beyond tensors is measured.
_SETTLED = 4  # Steps until the heap stops growing.
_FULL = 2  # Steps until all tensors exist, including optimizer state.
_LEAST = 2  # Rounds of each process per time window.
_TURNS = 3  # Time windows for each number of processes.
ROUNDS = 40  # Approximate total cost in rounds of a single process.


def measure_contention(
    spec: ProgramSpec,
    source: str,
    state: dict[str, torch.Tensor],
    inputs: Values,
    ranks: int,
    *,
    seconds: float,
    timeout: float,
    large: Values | None = None,
    progress: Callable[[str], None] | None = None,
) -> ContentionProfile:
    """Measure CPU contention with 1 to ``ranks`` processes of this host, at most eight.

    spec, source: of a program with one stage. inputs: one microbatch. seconds: minimum duration of
    the time windows for one number of processes; each process runs at least six rounds. timeout:
    seconds in all. large: microbatch for the measurement of process memory, by default ``inputs``.
    Heap fragmentation measure_own_growth with activations, so few rows would underestimate it.
    """
    count = min(MOST, ranks)
    world = count if count == 1 else max(3, count)  # Two processes communicate while one computes.
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
        _write(Path(name), spec, source, state, inputs, large or inputs)
        payload = {"folder": name, "count": count, "seconds": seconds}
        rows = run_on_processes(world, _TIME_TARGET, payload, timeout, progress=progress)
    return summary(rows, count)


def measure_process_memory(
    spec: ProgramSpec,
    source: str,
    state: dict[str, torch.Tensor],
    inputs: Values,
    *,
    timeout: float = 120.0,
) -> ProcessMemoryGrowth:
    """Measure the memory of a rank's process beyond its tensors.

    The arguments are those of :func:`measure_contention`, which measures this as well.
    """
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
        _write(Path(name), spec, source, state, inputs, inputs)
        return _combine_growth(
            run_on_processes(_MEMORY_PROCESSES, _MEMORY_TARGET, {"folder": name}, timeout)
        )


def _combine_growth(rows: Sequence[dict[str, Any]]) -> ProcessMemoryGrowth:
    """Return the median baseline and the largest overhead, as heap fragmentation varies."""
    there = [row for row in rows if row["baseline"]]
    baseline = statistics.median(row["baseline"] for row in there)
    return ProcessMemoryGrowth(int(baseline), max(float(row["overhead"]) for row in there))


def summary(rows: Sequence[dict[str, Any]], count: int) -> ContentionProfile:
    """Summarize the processes' measurements; times are relative to a single process."""
    alone = rows[0]["busy"][0]
    slowdown = [1.0]
    for busy in range(2, count + 1):
        taken = statistics.harmonic_mean([row["busy"][busy - 1] for row in rows[:busy]])
        # More ranks are never faster, apart from noise.
        slowdown.append(max(slowdown[-1], taken / alone))
    beside = rows[0]["beside"] / alone if rows[0]["beside"] else 1.0
    grown = _combine_growth(rows)
    return ContentionProfile(
        slowdown=tuple(slowdown),
        transfer=equivalent(slowdown, beside),
        wake=tuple(rows[0]["wake"]),
        meet=tuple(rows[0]["meet"]),
        uneven=msgspec.convert(rows[0]["uneven"], CpuLoadImbalance | None),
        baseline=grown.baseline,
        overhead=grown.overhead,
    )


def equivalent(slowdown: Sequence[float], found: float) -> float:
    """Return the number of computing ranks, 0 to 2, that cause the slowdown ``found``."""
    for busy in range(1, len(slowdown)):
        low, high = slowdown[busy - 1], slowdown[busy]
        if found <= high and high > low:
            return min(2.0, max(0.0, busy - 1 + (found - low) / (high - low)))
    return 0.0 if found <= slowdown[-1] or len(slowdown) < 2 else min(2.0, len(slowdown) - 1.0)


def _write(
    folder: Path,
    spec: ProgramSpec,
    source: str,
    state: dict[str, torch.Tensor],
    inputs: Values,
    large: Values,
) -> None:
    """Write the files for all processes; weights are not written, as they are drawn randomly."""
    names = {s.name for s in spec.stages[0].state if s.kind != "parameter"}
    kept = {n: state[n].detach().cpu().contiguous().clone() for n in sorted(names)}
    (folder / "stage.py").write_text(source, encoding="utf-8")
    (folder / "program.json").write_bytes(msgspec.json.encode(spec))
    safetensors.torch.save_file(kept, folder / "state.safetensors")
    for file, values in ((_INPUTS, inputs), (_LARGE, large)):
        given = {n: t.detach().cpu().contiguous().clone() for n, t in values.items()}
        safetensors.torch.save_file(given, folder / file)


def _read(folder: Path, inputs: str) -> tuple[StageRun, Values]:
    """Return the stage with random weights, and the inputs in the file."""
    spec = msgspec.json.decode((folder / "program.json").read_bytes(), type=ProgramSpec)
    state = safetensors.torch.load_file(folder / "state.safetensors")
    for item in spec.stages[0].state:
        if item.kind == "parameter":
            state[item.name] = torch.randn(item.shape, dtype=getattr(torch, item.dtype)) * 0.02
    source = (folder / "stage.py").read_text(encoding="utf-8")
    run = StageRun(spec, 0, source, state, "sgd", torch.device("cpu"))
    return run, safetensors.torch.load_file(folder / inputs)


def work(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a process: time rounds beside 1, 2, ... processes and beside transfers."""
    count, seconds = int(payload["count"]), float(payload["seconds"])
    folder = Path(payload["folder"])
    grown = measure_own_growth(folder) if rank < _MEMORY_PROCESSES else ProcessMemoryGrowth(0, 0.0)
    run, inputs = _read(folder, _INPUTS)
    _round(run, inputs)  # Warm-up.
    turns = [
        [
            _time_window(lambda: _round(run, inputs), rank < processes, seconds / _TURNS)
            for processes in range(1, count + 1)
        ]
        for _ in range(_TURNS)
    ]
    busy = [statistics.median(each) for each in zip(*turns, strict=True)]
    beside = (
        _time_beside_transfers(run, inputs, rank, max(seconds, 5 * busy[0])) if world > 2 else 0.0
    )
    waits, uneven = _measure_rings(rank, world) if world > 2 else ((), None)
    meets = measure_arrival_skew(rank, count) if count > 1 else ()
    return {
        "busy": busy,
        "beside": beside,
        "baseline": grown.baseline,
        "wake": list(waits),
        "meet": list(meets),
        "uneven": uneven,
        "overhead": grown.overhead,
    }


def _measure_rings(rank: int, world: int) -> tuple[tuple[float, ...], dict[str, float] | None]:
    """Return wakeup latencies and the load imbalance of cores, both measured in rings."""
    work, transport = ComputeLoad(agree_on_products()), connect(world)
    waits = measure_wakeup_latency(rank, world, work, transport)
    uneven = measure_load_imbalance(rank, world, count_unshared_cores(), transport)
    transport.close()
    return waits, None if uneven is None else msgspec.structs.asdict(uneven)


def count_unshared_cores() -> int:
    """Return the number of ranks that do not share cores; 0 for ranks with several threads."""
    return cores() if torch.get_num_threads() == 1 else 0


def measure_memory(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a process: return its memory beyond tensors."""
    del rank, world
    found = measure_own_growth(Path(payload["folder"]))
    return {"baseline": found.baseline, "overhead": found.overhead}


def measure_own_growth(folder: Path) -> ProcessMemoryGrowth:
    """Measure the memory of this process beyond tensors while it trains the model in the folder.

    Everything that is independent of the model is loaded first: imports of ranks, and code that
    torch loads at the first optimizer step.
    """
    importlib.import_module("fxpart.training.trainer_factory")
    overhead(torch.device("cpu"))
    return growth(
        lambda: _train(*_read(folder, _LARGE), _SETTLED),
        lambda: _train(*_read(folder, _LARGE), _FULL),
    )


def _train(run: StageRun, inputs: Values, steps: int) -> None:
    """Train steps of two microbatches each, with new gradients in each step."""
    trained = [p for p in run.module.parameters() if p.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = None
        for _ in range(2):
            _round(run, inputs)
        optimizers = optimizers or make_optimizers(trained)
        for optimizer in optimizers:
            optimizer.step()


def make_optimizers(trained: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Return optimizers with Adam state that hardly change the parameters.

    AdamW handles dense gradients only, and SparseAdam sparse ones only.
    """
    sparse = [p for p in trained if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in trained if not any(p is other for other in sparse)]
    found: list[torch.optim.Optimizer] = []
    if dense:
        found.append(torch.optim.AdamW(dense, lr=0.0))
    if sparse:
        found.append(torch.optim.SparseAdam(sparse, lr=1e-30))
    return found


def _round(run: StageRun, inputs: Values) -> float:
    """Run forward and backward of one microbatch, adding to gradients; return the seconds."""
    start = time.perf_counter()
    cell = run.forward(inputs, train=True)
    if run.table.trains:
        run.backward(cell, run.gradients(cell), 1.0)
    return time.perf_counter() - start


def _time_window(once: Callable[[], float], active: bool, seconds: float) -> float:
    """Return mean seconds of a round within the common time window; 0 if not ``active``."""
    dist.barrier()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while active and (len(taken) < _LEAST or time.perf_counter() < end):
        taken.append(once())
    dist.barrier()
    return statistics.fmean(taken) if taken else 0.0


def _time_beside_transfers(run: StageRun, inputs: Values, rank: int, seconds: float) -> float:
    """Time the first process while the next two send a large tensor back and forth."""
    length = torch.tensor([seconds])
    dist.broadcast(length, 0)
    dist.barrier()
    end = time.perf_counter() + float(length)
    if rank in (1, 2):
        _exchange(rank, end)
    taken: list[float] = []
    while rank == 0 and (not taken or time.perf_counter() < end):
        taken.append(_round(run, inputs))
    dist.barrier()
    return statistics.median(taken) if taken else 0.0


def _exchange(rank: int, end: float) -> None:
    """Send a tensor between ranks 1 and 2; its first element is 0 in the last message."""
    tensor = torch.ones(_EXCHANGED)
    while tensor[0]:
        if rank == 1:
            tensor[0] = float(time.perf_counter() < end)
            dist.send(tensor, 2)
            dist.recv(tensor, 2)
        else:
            dist.recv(tensor, 1)
            dist.send(tensor, 1)


def measure_wakeup_latency(
    rank: int, world: int, work: ComputeLoad, transport: Transport
) -> tuple[float, ...]:
    """Return the wakeup latency while 1, 2, ... world - 1 ranks compute, equal on all ranks.

    Ranks in a ring (:mod:`fxpart.profiling.token_ring`) compute for some milliseconds each, as many
    at once as there are tokens. The latency is the time of a hop beyond its computation, minus that
    with a single token: the operating system makes a woken process wait for a core.

    All ranks of the group must call this. At least three ranks are needed for a result.
    """
    rows = torch.zeros(2, world - 1)
    for tokens in range(1, world):
        taken = time_concurrent_compute(rank, tokens, work, _ROUNDS * PIECE)
        rows[0, tokens - 1] = statistics.fmean(taken) if taken else 0.0
        turned = ring(rank, world, tokens, _ROUNDS, work, transport)
        rows[1, tokens - 1] = turned * tokens / (_ROUNDS * world)
    gathered = [torch.zeros_like(rows) for _ in range(world)]
    dist.all_gather(gathered, rows)
    alone = [
        statistics.median(float(row[0, k]) for row in gathered[: k + 1]) for k in range(world - 1)
    ]
    hops = [statistics.median(float(row[1, k]) for row in gathered) for k in range(world - 1)]
    return compute_wakeup_latency(alone, hops)


def compute_wakeup_latency(computing: Sequence[float], hops: Sequence[float]) -> tuple[float, ...]:
    """Return wakeup latencies in seconds, from the times of computations and hops.

    Both are given while 1, 2, ... ranks compute. The first hop contains the cost of the message
    itself. The latency never decreases with more ranks, apart from noise.
    """
    found = [0.0]
    for taken, hop in list(zip(computing, hops, strict=True))[1:]:
        longer = (hop - taken) - (hops[0] - computing[0])
        found.append(min(_MOST, max(found[-1], longer)))
    return tuple(found)
