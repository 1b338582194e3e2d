"""Runs generated stages one after another in one process, and the unsplit graph as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fxpart.passes import PREPARE, all_passes
from torch import fx

from fxpart.capture import CapturedModel, capture
from fxpart.codegen.materialization import materialize
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import split
from fxpart.compiler import PassManager
from fxpart.program.spec import ProgramSpec
from fxpart.verification.single_process import WholeGraph, clone_state


def prepared(captured: CapturedModel) -> fx.GraphModule:
    """The captured graph with blocks and gradients marked."""
    return PassManager(all_passes()).run(PREPARE, captured.graph)


def assigned(graph: fx.GraphModule, starts: Sequence[int]) -> fx.GraphModule:
    """The prepared graph with stages that start at these blocks."""
    text = ",".join(map(str, starts))
    return PassManager(all_passes()).run(f'assign{{starts="{text}"}}', graph)


def tensors(
    captured: CapturedModel, batch: Mapping[Any, Any] | Sequence[Any]
) -> list[torch.Tensor]:
    """The batch's tensors in the order of the captured inputs."""
    found = []
    for spec in captured.inputs:
        value: Any = batch
        for key in spec.path:
            value = value[key]
        found.append(value)
    return found


class Stages:
    """All stages of a program in one process; values cross detached, as over a network."""

    def __init__(
        self, captured: CapturedModel, graph: fx.GraphModule, *, keep_outputs: bool = False
    ) -> None:
        self.captured = captured
        self.spec, self.graphs = split(graph, captured, keep_outputs=keep_outputs)
        self.sources = [emit(stage) for stage in self.graphs]
        self.modules = [
            load_stage(text, stage.spec)
            for text, stage in zip(self.sources, self.graphs, strict=True)
        ]
        for module in self.modules:
            materialize(module, self.spec, captured.state)

    def run(
        self, inputs: Sequence[torch.Tensor], key: int, weight: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Forward through all stages, backward in reverse; every value that left a stage."""
        spec = self.spec
        user = {s.name: t for s, t in zip(spec.inputs, inputs, strict=True)}
        values: dict[str, torch.Tensor] = {}
        arrived: list[dict[str, torch.Tensor]] = []
        given: list[dict[str, torch.Tensor]] = []
        for stage, module in zip(spec.stages, self.modules, strict=True):
            arguments: list[torch.Tensor] = []
            arrived.append({})
            for value, source in zip(stage.inputs, stage.sources, strict=True):
                tensor = user[value.name] if source < 0 else values[value.name].detach()
                if value.requires_grad:
                    # Not .grad, which is laid out like the tensor: a sum over another layout
                    # may differ in its last bit.
                    keep = partial(arrived[-1].__setitem__, value.name)
                    tensor.requires_grad_().register_hook(keep)
                arguments.append(tensor)
            results = module(key, *arguments)
            given.append({v.name: t for v, t in zip(stage.outputs, results, strict=True)})
            values |= given[-1]
        self._backward(arrived, given, weight)
        return values

    def _backward(
        self,
        arrived: list[dict[str, torch.Tensor]],
        given: list[dict[str, torch.Tensor]],
        weight: float,
    ) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for stage in reversed(self.spec.stages):
            ends, starts = [], []
            for value in stage.outputs:
                tensor = given[stage.index][value.name]
                if value.name == self.spec.loss and value.requires_grad:
                    ends.append(tensor)
                    starts.append(torch.full_like(tensor, weight))
                elif value.requires_grad and value.name in gradients:
                    assert tensor.requires_grad, f"{value.name} should require a gradient"
                    ends.append(tensor)
                    starts.append(gradients[value.name])
            if ends:
                torch.autograd.backward(ends, starts)
            for name, gradient in arrived[stage.index].items():
                known = gradients.get(name)
                gradients[name] = gradient if known is None else known + gradient

    def state(self) -> dict[str, torch.Tensor]:
        """The owner's tensors by original name."""
        return {
            s.name: getattr(self.modules[stage.index], s.attribute)
            for stage in self.spec.stages
            for s in stage.state
            if s.owner == stage.index
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by original name, ties summed from the last stage to the first."""
        total: dict[str, torch.Tensor] = {}
        for stage in reversed(self.spec.stages):
            for s in stage.state:
                grad = getattr(self.modules[stage.index], s.attribute).grad
                if grad is not None:
                    total[s.name] = grad if s.name not in total else total[s.name] + grad
        return total

    def clear(self) -> None:
        """Drop all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)


class Whole:
    """The unsplit graph with its own copy of the state."""

    def __init__(self, captured: CapturedModel, graph: fx.GraphModule) -> None:
        self.state = clone_state(captured)
        self.graph = WholeGraph(graph, self.state)

    def run(
        self, inputs: Sequence[torch.Tensor], key: int, weight: float = 1.0
    ) -> tuple[torch.Tensor, ...]:
        """Forward and backward; returns (loss, *outputs)."""
        results: tuple[torch.Tensor, ...] = self.graph.run(key, *inputs)
        if results[0].requires_grad:
            torch.autograd.backward([results[0]], [torch.full_like(results[0], weight)])
        return results

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by original name."""
        return {n: t.grad for n, t in self.state.items() if t.grad is not None}

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in self.state.values():
            tensor.grad = None


def sums(spec: ProgramSpec) -> bool:
    """Whether some gradient is a sum over stages, whose order may differ from one process."""
    several = any(len(t) > 1 for stage in spec.stages for t in stage.targets)
    return several or bool(spec.ties)


def captured_of(
    model: torch.nn.Module, batch: Any, loss: Any = None, **options: Any
) -> CapturedModel:
    """Capture with a batch that is a dict of keyword arguments or a tuple."""
    if isinstance(batch, Mapping):
        return capture(model, example_kwargs=dict(batch), loss=loss, **options)
    return capture(model, batch, loss=loss, **options)


def check_equal(
    captured: CapturedModel,
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    exact: bool | None = None,
    runs: int = 2,
) -> Stages:
    """Assert that stages and unsplit graph agree on loss, gradients and buffers over some runs.

    exact: bit for bit; by default wherever no gradient is a sum over stages.
    """
    stages, whole = Stages(captured, graph), Whole(captured, graph)
    exact = not sums(stages.spec) if exact is None else exact
    for key in range(runs):
        loss = stages.run(inputs, key, 0.5)[stages.spec.loss]
        expected = whole.run(inputs, key, 0.5)[0]
        assert torch.equal(loss, expected), f"loss {loss} should be {expected}"
        _compare(stages.gradients(), whole.gradients(), exact, "gradient")
        stages.clear()
        whole.clear()
    held = stages.state()
    assert set(held) <= set(whole.state)
    for name, tensor in held.items():
        assert torch.equal(tensor, whole.state[name]), f"state {name}"
    return stages


def _compare(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], exact: bool, what: str
) -> None:
    assert got.keys() == expected.keys(), f"{what}: {got.keys() ^ expected.keys()}"
    sizes = {name: float(value.abs().max()) for name, value in expected.items() if value.numel()}
    top = max(sizes.values(), default=0.0)
    for name, value in expected.items():
        if exact:
            assert torch.equal(got[name], value), f"{what} {name}"
        elif name in sizes:
            # A weight before a normalisation has no gradient but rounding: measured by the others.
            size = sizes[name] if sizes[name] > 1e-4 * top else top
            difference = float((got[name] - value).abs().max())
            assert difference <= 1e-6 * size, f"{what} {name}: {difference} of {size}"
