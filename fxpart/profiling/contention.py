"""How ranks of one host slow each other down: one model's microbatch in several processes at once.

Every process runs the model's whole forward and backward, its own copy, for the same stretch of
time: alone, then beside one other, and so on up to the ranks of the host, and all that in several
turns, since what else a machine does changes within seconds. With more ranks than cores this
measures the operating system's sharing of them: single rounds then take as long as one process or
as two, as it comes, and only how many are done in all is a measure. The model travels as an
exported program, so that no process needs the user's code.
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

_ROUNDS = 24  # computations of each rank in a ring
_MOST = 0.05  # seconds: more than that is no waiting for a core

MOST = 8  # ranks measured at once
_BUSY = "fxpart.profiling.contention:work"
_WEIGHED = "fxpart.profiling.contention:weigh"
_INPUTS, _LARGE = "inputs.safetensors", "large.safetensors"
_EXCHANGED = 1 << 22  # numbers of a tensor that is sent to and fro: 16 MiB
_WEIGHING = 2  # processes of which each says what it takes beside its tensors
_SETTLED = 4  # steps until a heap grows no more
_FULL = 2  # steps until there is all that there will be: the optimizer's state beside activations
_LEAST = 2  # rounds of each process in each stretch
_TURNS = 3  # stretches of each number of processes
ROUNDS = 40  # of the model's microbatch that all of it takes at least, about, and as slow as alone


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
    """Measured with 1 to ``ranks`` processes of this host, eight at most.

    spec, source: of the program of one stage. inputs: one microbatch. seconds: of the
    stretches of one number of processes, at least; each process runs six rounds in any case.
    timeout: of everything. large: the microbatch that a process trains while it is weighed, by
    default the same: a heap loses more of activations than of weights, so that few rows would make
    the loss too small for plans of more.
    """
    count = min(MOST, ranks)
    world = count if count == 1 else max(3, count)  # two exchange beside one that computes
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
        _write(Path(name), spec, source, state, inputs, large or inputs)
        payload = {"folder": name, "count": count, "seconds": seconds}
        rows = run_on_processes(world, _BUSY, payload, timeout, progress=progress)
    return summary(rows, count)


def measure_process_memory(
    spec: ProgramSpec,
    source: str,
    state: dict[str, torch.Tensor],
    inputs: Values,
    *,
    timeout: float = 120.0,
) -> ProcessMemoryGrowth:
    """What a rank's process of this host takes beside tensors, of a model as for
    :func:`measure_contention`.

    :func:`measure_contention` measures it as well, and how long ranks take.
    """
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
        _write(Path(name), spec, source, state, inputs, inputs)
        return _largest(run_on_processes(_WEIGHING, _WEIGHED, {"folder": name}, timeout))


def _largest(rows: Sequence[dict[str, Any]]) -> ProcessMemoryGrowth:
    """Of the processes that were weighed; how a heap falls to pieces is never the same twice."""
    there = [row for row in rows if row["baseline"]]
    baseline = statistics.median(row["baseline"] for row in there)
    return ProcessMemoryGrowth(int(baseline), max(float(row["overhead"]) for row in there))


def summary(rows: Sequence[dict[str, Any]], count: int) -> ContentionProfile:
    """What the processes' answers amount to: seconds of a round by how many are done in all.

    Relative to one process alone.
    """
    alone = rows[0]["busy"][0]
    slowdown = [1.0]
    for busy in range(2, count + 1):
        taken = statistics.harmonic_mean([row["busy"][busy - 1] for row in rows[:busy]])
        # More ranks are never faster; what says so is noise.
        slowdown.append(max(slowdown[-1], taken / alone))
    beside = rows[0]["beside"] / alone if rows[0]["beside"] else 1.0
    grown = _largest(rows)
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
    """As how many computing ranks something counts that slows one rank down so much: 0 to 2."""
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
    """What every process reads. Weights are drawn there; other state is small, and written."""
    names = {s.name for s in spec.stages[0].state if s.kind != "parameter"}
    kept = {n: state[n].detach().cpu().contiguous().clone() for n in sorted(names)}
    (folder / "stage.py").write_text(source, encoding="utf-8")
    (folder / "program.json").write_bytes(msgspec.json.encode(spec))
    safetensors.torch.save_file(kept, folder / "state.safetensors")
    for file, values in ((_INPUTS, inputs), (_LARGE, large)):
        given = {n: t.detach().cpu().contiguous().clone() for n, t in values.items()}
        safetensors.torch.save_file(given, folder / file)


def _read(folder: Path, inputs: str) -> tuple[StageRun, Values]:
    """The stage with drawn weights, and the inputs of that file."""
    spec = msgspec.json.decode((folder / "program.json").read_bytes(), type=ProgramSpec)
    state = safetensors.torch.load_file(folder / "state.safetensors")
    for held in spec.stages[0].state:
        if held.kind == "parameter":
            state[held.name] = torch.randn(held.shape, dtype=getattr(torch, held.dtype)) * 0.02
    source = (folder / "stage.py").read_text(encoding="utf-8")
    run = StageRun(spec, 0, source, state, "sgd", torch.device("cpu"))
    return run, safetensors.torch.load_file(folder / inputs)


def work(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One process: seconds of a round while 1, 2, ... processes run, and beside an exchange."""
    count, seconds = int(payload["count"]), float(payload["seconds"])
    folder = Path(payload["folder"])
    grown = grows(folder) if rank < _WEIGHING else ProcessMemoryGrowth(0, 0.0)
    run, inputs = _read(folder, _INPUTS)
    _round(run, inputs)  # warm
    turns = [
        [
            _stretch(lambda: _round(run, inputs), rank < together_, seconds / _TURNS)
            for together_ in range(1, count + 1)
        ]
        for _ in range(_TURNS)
    ]
    busy = [statistics.median(each) for each in zip(*turns, strict=True)]
    beside = _beside(run, inputs, rank, max(seconds, 5 * busy[0])) if world > 2 else 0.0
    waits, uneven = _of_rings(rank, world) if world > 2 else ((), None)
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


def _of_rings(rank: int, world: int) -> tuple[tuple[float, ...], dict[str, float] | None]:
    """How long woken ranks wait, and how long cores are not all used."""
    work, transport = ComputeLoad(agree_on_products()), connect(world)
    waits = measure_wakeup_latency(rank, world, work, transport)
    uneven = measure_load_imbalance(rank, world, side_by_side(), transport)
    transport.close()
    return waits, None if uneven is None else msgspec.structs.asdict(uneven)


def side_by_side() -> int:
    """How many ranks compute on this host without sharing cores; 0 where they are of several."""
    return cores() if torch.get_num_threads() == 1 else 0


def weigh(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One process alone: what it takes beside its tensors."""
    del rank, world
    found = grows(Path(payload["folder"]))
    return {"baseline": found.baseline, "overhead": found.overhead}


def grows(folder: Path) -> ProcessMemoryGrowth:
    """What this process takes beside the tensors of the model in the folder while it trains it.

    Before, it gets all that training needs and a model does not: what ranks import, and what torch
    loads when an optimizer steps first.
    """
    importlib.import_module("fxpart.training.trainer_factory")
    overhead(torch.device("cpu"))
    return growth(
        lambda: _trained(*_read(folder, _LARGE), _SETTLED),
        lambda: _trained(*_read(folder, _LARGE), _FULL),
    )


def _trained(run: StageRun, inputs: Values, steps: int) -> None:
    """Steps of two microbatches each, from gradients that are made anew."""
    trained = [p for p in run.module.parameters() if p.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = None
        for _ in range(2):
            _round(run, inputs)
        optimizers = optimizers or steppers(trained)
        for optimizer in optimizers:
            optimizer.step()


def steppers(trained: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Optimizers with Adam's state for parameters with gradients, whose numbers hardly change.

    AdamW takes no sparse gradients, and SparseAdam no others.
    """
    sparse = [p for p in trained if p.grad is not None and p.grad.is_sparse]
    rest = [p for p in trained if not any(p is other for other in sparse)]
    found: list[torch.optim.Optimizer] = []
    if rest:
        found.append(torch.optim.AdamW(rest, lr=0.0))
    if sparse:
        found.append(torch.optim.SparseAdam(sparse, lr=1e-30))
    return found


def _round(run: StageRun, inputs: Values) -> float:
    """Forward and backward of one microbatch, on gradients that are there."""
    start = time.perf_counter()
    cell = run.forward(inputs, train=True)
    if run.table.trains:
        run.backward(cell, run.gradients(cell), 1.0)
    return time.perf_counter() - start


def _stretch(once: Callable[[], float], active: bool, seconds: float) -> float:
    """Seconds of a round of a process that runs as long as the others; 0 of one that waits."""
    dist.barrier()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while active and (len(taken) < _LEAST or time.perf_counter() < end):
        taken.append(once())
    dist.barrier()
    return statistics.fmean(taken) if taken else 0.0


def _beside(run: StageRun, inputs: Values, rank: int, seconds: float) -> float:
    """The first process computes while the next two send a large tensor to and fro."""
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
    """Ranks 1 and 2 send a tensor to and fro; its first number says whether it comes again."""
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
    """Seconds of waiting while 1, 2, ... world - 1 ranks compute; every rank gets the same.

    Ranks in a ring (:mod:`fxpart.profiling.token_ring`) compute for some milliseconds each, as many
    at once as there are tokens. A hop takes longer than the computation, beyond what it takes with
    a single token, while the operating system makes a woken process wait for a core.

    All ranks of the group call it. Two ranks say nothing: a token less than ranks is one.
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
    """Seconds of waiting, from those of a computation and of a hop while 1, 2, ... compute.

    The first hop holds what a message takes anyway. More ranks never wait less; what says so is
    noise.
    """
    found = [0.0]
    for taken, hop in list(zip(computing, hops, strict=True))[1:]:
        longer = (hop - taken) - (hops[0] - computing[0])
        found.append(min(_MOST, max(found[-1], longer)))
    return tuple(found)
