"""Batches of a comparison: an inexpensive, deterministic slice of the example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.model_tensors import loss_prefix, state_of
from fxpart.compiler.work_estimate import work
from fxpart.verification.comparison_runs import STEPS

MOST_PARAMETERS = 200_000_000
MOST_WORK = 1.5e11  # multiplications of all runs
EASY_WORK = 1e10  # multiplications up to which no sequence is shortened
ROWS = 4
SHORT = (64, 32, 16)  # shortened sequence lengths
_RUNS = 3 * 2 * STEPS  # forward and twice the work in backward, of module and program


@dataclass(frozen=True)
class ComparisonSample:
    """rows: rows per batch. sizes: shortened sequence lengths by symbol. cost: multiplications."""

    rows: int
    sizes: Mapping[str, int]
    cost: float


def explain_skip(captured: CapturedModel) -> str:
    """Return why the module cannot run here, "" if it can."""
    if captured.eager is None or captured.example is None or captured.source is None:
        return "the module is not available"
    constants = set(find_leaked_constants(captured))
    if any(t.device.type == "meta" and n not in constants for n, t in captured.state.items()):
        return "the model has no data (meta tensors)"
    return ""


def find_leaked_constants(captured: CapturedModel) -> list[str]:
    """Return constants without data, which tracing left in the Python state of the model."""
    assert captured.source is not None, "a capture contains its module"
    model, loss = captured.source
    registered = state_of(model, loss, loss_prefix(model)).tensors
    if any(t.device.type == "meta" for t in registered.values()):
        return []
    return [n for n, t in captured.state.items() if t.device.type == "meta"]


def samples(captured: CapturedModel, graph: fx.GraphModule) -> list[ComparisonSample]:
    """Return slices to try, the most meaningful inexpensive one first."""
    batch = _batch_symbol(captured)
    whole = float(sum(work(n) for n in graph.graph.nodes if n.op == "call_function")) * _RUNS
    if not captured.symbolic or batch is None:
        return [ComparisonSample(captured.microbatch_size or captured.batch_size, {}, whole)]
    row = whole / max(1, captured.hints.get(batch, 1))
    entries = [entry for spec in captured.inputs for entry in spec.shape]
    if not all(isinstance(entry, int) or entry.isidentifier() for entry in entries):
        return [
            ComparisonSample(captured.batch_size, {}, row * captured.batch_size)
        ]  # sizes are expressions
    rows = max(1, min(ROWS, captured.batch_size))
    found = [ComparisonSample(rows, {}, row * rows)]
    lengths = [s for s in captured.symbols if s != batch and captured.hints.get(s, 0) > SHORT[-1]]
    if rows > 2 and row * rows > EASY_WORK:
        found.append(ComparisonSample(2, {}, row * 2))
    if lengths:
        longest = max(captured.hints[s] for s in lengths)
        for short in (s for s in SHORT if s < longest):
            sizes = {s: max(2, captured.hints[s] * short // longest) for s in lengths}
            found.append(
                ComparisonSample(min(rows, 2), sizes, row * min(rows, 2) * short / longest)
            )
    if rows < captured.batch_size:  # for a module that fails on parts of its batch
        found.append(ComparisonSample(captured.batch_size, {}, row * captured.batch_size))
    easy = [s for s in found if s.cost <= EASY_WORK]
    return [*easy[:1], *sorted((s for s in found if s not in easy[:1]), key=lambda s: s.cost)]


def parameters(captured: CapturedModel) -> int:
    """Return the number of parameter elements."""
    return sum(captured.state[name].numel() for name in captured.parameters)


def batches(
    captured: CapturedModel, tensors: Sequence[torch.Tensor], sample: ComparisonSample
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return the batch of each step, with different rows of the example if it has enough."""
    found = []
    for step in range(STEPS):
        cut = []
        for spec, tensor in zip(captured.inputs, tensors, strict=True):
            wanted = tensor.requires_grad
            for dim, entry in enumerate(spec.shape):
                if dim == spec.batch_dim:
                    tensor = _rows(tensor, dim, entry, sample.rows, step)
                elif isinstance(entry, str) and entry in sample.sizes:
                    tensor = tensor.narrow(dim, 0, sample.sizes[entry])
            cut.append(tensor.detach().clone().requires_grad_(wanted))
        found.append(tuple(cut))
    return tuple(found)


def _rows(tensor: torch.Tensor, dim: int, entry: int | str, rows: int, step: int) -> torch.Tensor:
    size = tensor.shape[dim]
    if isinstance(entry, int) and entry != rows:
        rows = entry  # a dim with a fixed multiple of the batch
    elif isinstance(entry, str) and not entry.isidentifier():
        return tensor  # the sample then has all rows
    start = step * rows if (step + 1) * rows <= size else 0
    index = torch.arange(start, start + rows) % size
    return tensor.index_select(dim, index.to(tensor.device))


def _batch_symbol(captured: CapturedModel) -> str | None:
    for spec in captured.inputs:
        if spec.batch_dim is not None:
            entry = spec.shape[spec.batch_dim]
            if isinstance(entry, str) and entry.isidentifier():
                return entry
    return None
