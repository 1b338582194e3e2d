"""Two steps of the user's module and of the captured program from the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.flat_batch import unflatten_batch
from fxpart.rng import microbatch_key
from fxpart.verification.float64 import Float64Mode, to_float64
from fxpart.verification.single_process import (
    WholeGraph,
    clone_state,
    draws_scalars,
    keyed_random,
)

STEPS = 2
LARGE = 30_000_000  # parameters; larger models run only the first backward
SCALE = 1 - 2**-5  # scale of the second step's weights


@dataclass
class ComparisonStep:
    """Results of one step: loss, outputs, gradients and state by name, gradients of inputs."""

    loss: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonSetup:
    """Shared setup of both runs.

    batches: of each step, the tensors in the order of ``captured.inputs``. tree: the structure of a
    batch. live: returns the module's current registered tensors by name. double: run in double
    precision.
    """

    captured: CapturedModel
    graph: fx.GraphModule
    seed: int
    batches: tuple[tuple[torch.Tensor, ...], ...]
    tree: Any
    live: Callable[[], Mapping[str, torch.Tensor]]
    double: bool = False

    def in_double(self) -> ComparisonSetup:
        """Return the same setup in double precision."""
        batches = tuple(tuple(to_float64(t.detach()).requires_grad_(t.requires_grad) for t in batch)
                        for batch in self.batches)  # fmt: skip
        return replace(self, batches=batches, double=True)

    def leaves(self, step: int) -> list[torch.Tensor]:
        """Return new leaf tensors for a step's batch."""
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in self.batches[step]]

    def differentiate(self, loss: torch.Tensor, step: int) -> None:
        """Run backward; large models run it only in the first step, to save time."""
        count = sum(self.captured.state[n].numel() for n in self.captured.parameters)
        if loss.requires_grad and (step == 0 or count <= LARGE):
            loss.backward()

    def key(self, step: int) -> int:
        """Return the seed of a step's random operations."""
        return microbatch_key(self.seed, step, 0)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Run operations in the setup's precision."""
        with ExitStack() as stack:
            if self.double:
                stack.enter_context(Float64Mode())
            yield


def run_module(
    given: ComparisonSetup, after: Callable[[int], None] = lambda step: None
) -> list[ComparisonStep]:
    """Run the user's module and loss; the caller restores what they change.

    after: called after each step, before the weights change.
    """
    captured = given.captured
    parameters = {n: captured.state[n] for n in captured.parameters}
    scalars, found = draws_scalars(given.graph), []
    original = {n: t.data for n, t in captured.state.items()}
    gradients = {n: t.grad for n, t in parameters.items()}
    try:
        if given.double:
            for tensor in captured.state.values():
                tensor.data = to_float64(tensor.data)
        for step in range(len(given.batches)):
            for tensor in parameters.values():
                tensor.grad = None
            leaves = given.leaves(step)
            with torch.enable_grad(), keyed_random(given.key(step), scalars=scalars):
                with given.precision():
                    loss, *outputs = run_eagerly(given, leaves)
                    given.differentiate(loss, step)
            found.append(
                ComparisonStep(
                    loss.detach(), tuple(o.detach() for o in outputs),
                    {n: _dense(t.grad) for n, t in parameters.items()},
                    _copied(captured, {**captured.state, **given.live()}),
                    _input_gradients(given, leaves),
                )
            )  # fmt: skip
            after(step)
            _scale(parameters.values())
    finally:
        for name, tensor in captured.state.items():
            if given.double:
                tensor.data = original[name]
        for name, tensor in parameters.items():
            tensor.grad = gradients[name]
    return found


def run_eagerly(given: ComparisonSetup, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run the user's module and loss on one batch."""
    assert given.captured.eager is not None, "a capture contains its module"
    return given.captured.eager(unflatten_batch(given.tree, list(leaves)))


def run_program(given: ComparisonSetup) -> list[ComparisonStep]:
    """Run the captured program on copies of the state."""
    captured, found = given.captured, []
    state = clone_state(captured, to_float64 if given.double else None)
    graph = WholeGraph(given.graph, state)
    for step in range(len(given.batches)):
        for tensor in state.values():
            tensor.grad = None
        leaves = given.leaves(step)
        with torch.enable_grad(), given.precision():
            loss, *outputs = graph.run(given.key(step), *leaves)
            given.differentiate(loss, step)
        found.append(
            ComparisonStep(
                loss.detach(),
                tuple(o.detach() for o in outputs if isinstance(o, torch.Tensor)),
                {n: _dense(state[n].grad) for n in captured.parameters},
                _copied(captured, state),
                _input_gradients(given, leaves),
            )
        )
        _scale(state[n] for n in captured.parameters)
    return found


def _scale(parameters: Any) -> None:
    """Scale the trained weights, so that the second step differs from the first."""
    with torch.no_grad():
        for tensor in parameters:
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.mul_(SCALE)


def _copied(captured: CapturedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the state that is not trained."""
    return {n: state[n].detach().clone() for n, t in captured.state.items() if not t.requires_grad}


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()


def _input_gradients(
    given: ComparisonSetup, leaves: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    pairs = zip(given.captured.inputs, leaves, given.batches[0], strict=True)
    return {spec.name: _dense(leaf.grad) for spec, leaf, asked in pairs if asked.requires_grad}
