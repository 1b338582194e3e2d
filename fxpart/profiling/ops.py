"""Time the forward and backward of each distinct op of a graph alone on the device.

An op runs as in a stage, on similar tensors. Several copies of these are used in rotation, so that
they are not in closer caches than in a stage, and results live as long as there. Ops that are
already in the profile are not measured again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpart.compiler.collective_calls import is_collective
from fxpart.costmodels import op_key
from fxpart.costmodels.op_work import flops, traffic
from fxpart.costmodels.profile_store import MeasurementEnvironment, Profile, TimeQuartiles
from fxpart.pricing.collective_traffic import is_plain
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.weights import trained_names
from fxpart.profiling.op_arguments import (
    OpArguments,
    OpCall,
    UnmeasurableOpError,
    bytes_of,
    tensors,
)
from fxpart.profiling.sampler import Sampler

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.costs import OpSpec
    from fxpart.pricing.variants import Sizes

# Arguments: what is measured, number done, number in all.
Progress = Callable[[str, int, int], None]
_CPU = torch.device("cpu")
_ROTATED = 16 << 20  # Minimum bytes of all copies of an op's tensors.
_COPIES = 32
_KEPT = 256 << 20  # Maximum bytes of results that stay alive.
_LONGEST = 2.0  # Multiple of its share of the budget that an op may use.
_FLOPS_A_BYTE = 10  # FLOP per byte of a typical device, to measure expensive ops first.


@dataclass
class OpMeasurementCounts:
    """Numbers of distinct ops: measured, known, left for lack of time, and skipped by reason."""

    measured: int = 0
    known: int = 0
    left: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass
class _PendingOp:
    node: fx.Node
    arguments: OpArguments
    op: OpSpec
    key: str
    times: int = 0

    @property
    def work(self) -> float:
        """The relative cost of all calls of the op."""
        moved = traffic(self.op) + traffic(self.op, True)
        done = flops(self.op) + flops(self.op, True)
        return self.times * (float(moved) + float(done) / _FLOPS_A_BYTE)


def measure(
    graph: fx.GraphModule,
    captured: CapturedModel,
    sizes: Sequence[Sizes],
    profile: Profile,
    setting: MeasurementEnvironment,
    budget: float,
    progress: Progress | None = None,
    *,
    device: torch.device = _CPU,
    date: str = "",
) -> OpMeasurementCounts:
    """Time the distinct ops of a graph at given sizes.

    graph: with blocks, whole or of one mesh rank. budget: seconds; expensive ops are measured
    first.
    """
    known = profile.get("ops", setting, TimeQuartiles)
    counts = OpMeasurementCounts()
    todo = _todo(graph, captured, sizes, device, known, counts)
    if not todo:
        return counts
    end = time.perf_counter() + budget
    fixed = engine_seconds(device)
    found: dict[str, TimeQuartiles] = {}
    for number, one in enumerate(todo):
        if progress is not None:
            progress("ops", number, len(todo))
        left = end - time.perf_counter()
        if left <= 0:
            counts.left = len(todo) - number
            break
        share = _LONGEST * left / (len(todo) - number)
        try:
            found |= time_op(one.arguments.call(one.node), one.key, share, fixed, device)
            counts.measured += 1
        except UnmeasurableOpError as why:
            counts.skipped[str(why)] += 1
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as why:
            # An op that fails on random values is priced by formula.
            counts.skipped[f"{one.op.name}: {str(why).splitlines()[0][:80]}"] += 1
    profile.put("ops", setting, found, date)
    return counts


def _todo(
    graph: fx.GraphModule,
    captured: CapturedModel,
    sizes: Sequence[Sizes],
    device: torch.device,
    known: dict[str, TimeQuartiles],
    counts: OpMeasurementCounts,
) -> list[_PendingOp]:
    """Return the ops that are not in the profile, expensive ones first."""
    specs = Specs(trained_names(captured) if captured.training else ())
    nodes = [
        (node, op)
        for node in graph.graph.nodes
        if annotation(node).block is not None
        and not (is_collective(node.target) and is_plain(node))
        and (op := specs.op(node)) is not None
    ]
    found: dict[str, _PendingOp] = {}
    done: set[str] = set()
    for one in sizes:
        arguments = OpArguments(graph, specs, one, device)
        keys: dict[OpSpec, str] = {}
        for node, op in nodes:
            key = keys.get(op) or keys.setdefault(op, op_key(one.op(op)))
            ends = (" forward", " backward") if op.gradients else (" forward",)
            if all(key + end in known for end in ends):
                done.add(key)
                continue
            new = _PendingOp(node, arguments, one.op(op), key)
            found.setdefault(key, new).times += 1
    counts.known = len(done)
    return sorted(found.values(), key=lambda t: (-t.work, t.key))


def time_op(
    call: OpCall, key: str, seconds: float, fixed: float, device: torch.device
) -> dict[str, TimeQuartiles]:
    """Time a call for about ``seconds``; return times by key and direction.

    fixed: seconds of the autograd engine per backward, which a stage pays only once.
    """
    sampler = Sampler(device)
    with torch.enable_grad():
        result = call()
        each = call.bytes + bytes_of(result)
        copies = [call, *(call.copy() for _ in range(min(_COPIES, _ROTATED // max(1, each))))]
        kept: list[Any] = [None] * (len(copies) if len(copies) * each <= _KEPT else 0)
        outputs = [t for t in tensors(result) if t.requires_grad]
        wanted = bool(outputs and call.wanted)
        del result, outputs

        def forward(number: int) -> None:
            place = number % len(copies)
            made = copies[place]()
            if kept:
                kept[place] = made

        timing = sampler.time(forward, seconds / 3 if wanted else seconds)
        found = {f"{key} forward": timing}
        if wanted:
            backward = _backward(copies, kept)
            back = sampler.time(backward, seconds * 2 / 3)
            found[f"{key} backward"] = _subtract(back, fixed)
        return found


def _backward(copies: Sequence[OpCall], kept: list[Any]) -> Callable[[int], None]:
    """Return a function that runs the backward of one copy after another, with given gradients."""
    kept[:] = [None] * len(kept)
    sets = []
    for call in copies:
        outputs = [t for t in tensors(call()) if t.requires_grad]
        sets.append((outputs, call.wanted, [torch.randn_like(t) for t in outputs]))

    def backward(number: int) -> None:
        place = number % len(sets)
        outputs, inputs, gradients = sets[place]
        made = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
        if kept:
            kept[place] = made

    return backward


def engine_seconds(device: torch.device) -> float:
    """Return the fixed seconds of autograd to start and end one backward.

    This is twice the time of the backward of one view minus that of two chained views.
    """
    source = torch.ones(4, device=device, requires_grad=True)
    gradient = torch.ones(4, device=device)
    sampler = Sampler(device)
    took = []
    for steps in (1, 2):
        result = source
        for _ in range(steps):
            result = result.view(4)

        def run(_: int, result: torch.Tensor = result) -> None:
            torch.autograd.grad(result, source, gradient, retain_graph=True)

        took.append(sampler.time(run, 0.05).seconds)
    return max(0.0, 2 * took[0] - took[1])


def _subtract(timing: TimeQuartiles, seconds: float) -> TimeQuartiles:
    """Subtract a fixed part from a timing."""
    median, low, high = (max(0.0, t - seconds) for t in (timing.seconds, timing.low, timing.high))
    return TimeQuartiles(median, low, high, timing.runs)
