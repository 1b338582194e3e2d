"""Split backward: first the gradients of a stage's inputs, later those of its weights.

Zero-bubble schedules (Qi et al., ICLR 2024) run the second half where a rank would be idle. Only
products of an activation and a weight are deferred (linear layers, convolutions), because each of
their two gradients is a product of its own. The first half runs the autograd graph only towards the
inputs, stores the gradient that arrives at each product, and frees what every other op saved as
soon as that op has run. The second half runs each product again, only towards its weight. Nothing
is computed twice, and all sums have the order of an unsplit backward.

The first half also computes gradients that cannot be deferred under this rule: of weights that
several products use (the order of their sum matters), of weights next to an op that computes both
gradients at once (norms, custom autograd functions and collectives), and of weights whose gradient
is cheap but whose operands are large (separate biases and scales).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpart.compat import own_backward, release_saved, saved_slots
from fxpart.runtime.executor.recompute import SavedTensorHandle, StageRecomputation

# Autograd's names, without "Backward0", of ops whose gradients are two independent products.
PRODUCTS = frozenset(
    (
        "Addbmm", "Addmm", "Addmv", "Addr", "Baddbmm", "Bmm", "Convolution",
        "ConvolutionOverrideable", "Linear", "MkldnnConvolution", "MkldnnLinear", "Mm", "Mv",
    )
)  # fmt: skip

Walk = list[tuple[Any, tuple[tuple[int, int], ...]]]


@dataclass(frozen=True, slots=True)
class _DeferredProduct:
    """A product (None: the roots) that runs again for these parameters."""

    node: int | None
    roots: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _BackwardSplit:
    """The split of graphs of one shape; nodes are indices in the walk.

    early: parameters whose gradients the first half computes. released: nodes that the second half
    does not run, with the names of their saved tensors. whole: why nothing can be deferred.
    """

    early: tuple[torch.Tensor, ...]
    late: tuple[_DeferredProduct, ...]
    released: tuple[tuple[int, tuple[str, ...]], ...]
    whole: str = ""


class WeightBackward:
    """The second half of a backward; :meth:`run` adds the gradients of the weights."""

    __slots__ = ("_runs",)

    def __init__(
        self, runs: list[tuple[list[GradientEdge], list[torch.Tensor], tuple[torch.Tensor, ...]]]
    ) -> None:
        """runs: start edges with their gradients, and the target parameters."""
        self._runs = runs

    def run(self) -> None:
        """Run it, and free the stored tensors."""
        runs, self._runs = self._runs, []
        runs.reverse()
        while runs:
            edges, gradients, parameters = runs.pop()
            torch.autograd.backward(edges, gradients, inputs=parameters)


class BackwardSplitter:
    """Splits the backwards of one stage; graphs of one shape are analyzed once.

    early: the attribute (or number) of each parameter whose gradient the first half computes, and
    why.
    """

    def __init__(
        self,
        module: nn.Module,
        tied: Sequence[torch.Tensor] = (),
        recompute: StageRecomputation | None = None,
    ) -> None:
        """Prepare to split the backwards of the module.

        tied: parameters whose gradients other stages wait for; the first half computes them.
        recompute: the recomputation of the module, if any; it runs in the first half.
        """
        self._recompute = recompute
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._tied = {id(p) for p in tied}
        self._shape: list[Any] = []
        self._plan: _BackwardSplit | None = None
        self.early: dict[str, str] = {}

    def first(
        self,
        tensors: Sequence[torch.Tensor | GradientEdge],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
    ) -> WeightBackward | None:
        """Add gradients to ``leaves`` (the inputs), and return the second half, None if there is
        none.

        tensors, gradients: start of the backward, as for torch.autograd.backward; a graph edge may
        replace a tensor.
        """
        if not tensors:
            return None
        roots = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in tensors]
        nodes, shape = _walk(roots, {id(leaf) for leaf in leaves})
        if self._plan is None or shape != self._shape:
            self._plan = self._analyze(nodes, shape)
            self._shape = shape
        plan = self._plan
        if not plan.late:
            torch.autograd.backward(tensors, gradients)  # type: ignore[arg-type]
            return None
        goals = (*leaves, *plan.early)
        if self._recompute is None:
            return _run_first_half(plan, nodes, roots, gradients, goals)
        self._recompute.unpacked = []
        try:
            return _run_first_half(plan, nodes, roots, gradients, goals, self._recompute.unpacked)
        finally:
            self._recompute.unpacked = None

    def _analyze(self, nodes: list[Any], shape: Walk) -> _BackwardSplit:
        """Analyze a graph of this shape."""
        if any(_is_compiled(node) for node in nodes):  # torch frees its tensors at once.
            plan = _BackwardSplit((), (), (), "compiled by torch.compile")
        else:
            plan = _BackwardGraphAnalysis(nodes, shape, self._tied).plan()
        names = (self._names.get(id(p), f"#{i}") for i, p in enumerate(plan.early))
        self.early = dict.fromkeys(names, plan.whole or "needed early")
        return plan


def _walk(roots: Sequence[GradientEdge], leaves: set[int]) -> tuple[list[Any], Walk]:
    """Return all nodes below the roots, and the graph's shape: per node its kind and edges.

    The last entry of the shape represents the roots. A leaf's kind is its tensor's identity, or
    None for an input.
    """
    index: dict[Any, int] = {}
    nodes: list[Any] = []
    for edge in roots:
        if edge.node not in index:
            index[edge.node] = len(nodes)
            nodes.append(edge.node)
    shape: Walk = []
    for node in nodes:  # The list grows during the walk.
        edges = []
        for slot, (below, place) in enumerate(node.next_functions):
            if below is not None:
                at = index.get(below)
                if at is None:
                    at = index[below] = len(nodes)
                    nodes.append(below)
                edges.append((at, slot, place))
        kind: Any = type(node)
        if not edges:
            variable = getattr(node, "variable", None)
            if variable is not None:
                kind = None if id(variable) in leaves else id(variable)
        shape.append((kind, tuple(edges)))  # type: ignore[arg-type]
    shape.append((None, tuple((index[e.node], i, e.output_nr) for i, e in enumerate(roots))))  # type: ignore[misc]
    return nodes, shape


def _is_compiled(node: Any) -> bool:
    return own_backward(node) is not None and node.name().startswith("CompiledFunction")


def _run_first_half(
    plan: _BackwardSplit,
    nodes: list[Any],
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    goals: tuple[torch.Tensor, ...],
    unpacked: list[SavedTensorHandle] | None = None,
) -> WeightBackward:
    """Run the first half towards ``goals``. unpacked: handles read by nodes, if recomputed."""
    arrived: dict[int, tuple[torch.Tensor | None, ...]] = {}
    hooks = []
    if goals:
        for late in plan.late:
            if late.node is not None:
                hooks.append(
                    nodes[late.node].register_prehook(_make_store_hook(arrived, late.node))
                )
                if unpacked is not None:
                    hooks.append(nodes[late.node].register_hook(_make_forget_hook(unpacked)))
        for place, slots in plan.released:
            release = (
                _make_release_hook(nodes[place], slots)
                if unpacked is None
                else _make_empty_hook(unpacked)
            )
            hooks.append(nodes[place].register_hook(release))
        try:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=goals)
        finally:
            for hook in hooks:
                hook.remove()
    runs = []
    for late in plan.late:
        if late.node is None:
            edges = [roots[i] for i in late.roots]
            runs.append((edges, [gradients[i] for i in late.roots], late.parameters))
            continue
        found = [
            (GradientEdge(nodes[late.node], slot), gradient)
            for slot, gradient in enumerate(arrived.get(late.node, ()))
            if gradient is not None
        ]
        if found:  # Otherwise no gradient has arrived.
            runs.append(([e for e, _ in found], [g for _, g in found], late.parameters))
    return WeightBackward(runs)


def _make_store_hook(
    arrived: dict[int, tuple[torch.Tensor | None, ...]], at: int
) -> Callable[..., None]:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        arrived[at] = gradients

    return keep


def _make_release_hook(node: Any, slots: tuple[str, ...]) -> Callable[..., None]:
    def release(inputs: object, outputs: object) -> None:
        release_saved(node, slots)

    return release


def _make_empty_hook(unpacked: list[SavedTensorHandle]) -> Callable[..., None]:
    def empty(inputs: object, outputs: object) -> None:
        for slot in unpacked:
            slot.value = None
        unpacked.clear()

    return empty


def _make_forget_hook(unpacked: list[SavedTensorHandle]) -> Callable[..., None]:
    def forget(inputs: object, outputs: object) -> None:
        unpacked.clear()

    return forget


class _BackwardGraphAnalysis:
    """Finds the gradients of a graph that can be deferred; parameters are bits of an integer."""

    def __init__(self, nodes: list[Any], shape: Walk, tied: set[int]) -> None:
        """tied: parameters (by identity) that are needed early."""
        self._nodes, self._shape, self._end = nodes, shape, len(nodes)
        self._parameters = [
            node.variable if kind is not None and not edges and hasattr(node, "variable") else None
            for node, (kind, edges) in zip(nodes, shape, strict=False)
        ]
        self._order = _sort_below_first(shape)
        # Per node: whether an input (or an early parameter) is below it, and which other
        # parameters.
        self._reaches_goal = [False] * (len(nodes) + 1)
        self._parameters_below = [0] * (len(nodes) + 1)
        for at in self._order:
            kind, edges = shape[at]
            parameter = self._parameters[at] if at < self._end else None
            if not edges and at < self._end:
                self._reaches_goal[at] = hasattr(nodes[at], "variable") and (
                    kind is None or kind in tied
                )
            self._parameters_below[at] = (
                1 << at if parameter is not None and not self._reaches_goal[at] else 0
            )
            for below, _, _ in edges:  # type: ignore[misc]
                self._reaches_goal[at] |= self._reaches_goal[below]
                self._parameters_below[at] |= self._parameters_below[below]

    def plan(self) -> _BackwardSplit:
        """Return the split."""
        fronts = self._find_fronts()
        early = self._find_early(fronts)
        late = []
        for at, slots in fronts.items():
            under = 0
            for _, below in slots:
                under |= (
                    self._parameters_below[below]
                    if not self._parameters_below[below] & early
                    else 0
                )
            if under:
                parameters = tuple(self._tensors(under))
                starts = tuple(
                    slot for slot, below in slots if not self._parameters_below[below] & early
                )
                late.append(_DeferredProduct(None if at == self._end else at, starts, parameters))
        forced = [
            p for at, p in enumerate(self._parameters) if p is not None and self._reaches_goal[at]
        ]
        before = (*forced, *self._tensors(early))
        if not late:
            return _BackwardSplit(before, (), (), "no product can be deferred")
        return _BackwardSplit(before, tuple(late), self._find_released(fronts, early))

    def _find_fronts(self) -> dict[int, list[tuple[int, int]]]:
        """Return where paths to inputs and to parameters only separate: per node (slot, node
        below).
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for at in reversed(self._order):
            if at != self._end and not self._reaches_goal[at]:
                continue
            for below, slot, _ in self._shape[at][1]:  # type: ignore[misc]
                if not self._reaches_goal[below] and self._parameters_below[below]:
                    found.setdefault(at, []).append((slot, below))
        return found

    def _find_early(self, fronts: dict[int, list[tuple[int, int]]]) -> int:
        """Return parameters whose gradients the first half computes although none is an input's."""
        once = early = 0
        for at, slots in fronts.items():
            under = 0
            for _, below in slots:
                under |= self._parameters_below[below]
            early |= once & under
            once |= under
            if at != self._end and not self._is_product(at):
                early |= under
        masks = [self._parameters_below[below] for slots in fronts.values() for _, below in slots]
        grown = -1
        while grown != early:  # A parameter that shares a path with an early one is early too.
            grown = early
            for mask in masks:
                early |= mask if mask & early else 0
        return early

    def _is_product(self, at: int) -> bool:
        name = self._nodes[at].name()
        return name.rstrip("0123456789").removesuffix("Backward") in PRODUCTS

    def _find_released(
        self, fronts: dict[int, list[tuple[int, int]]], early: int
    ) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return nodes that save tensors and are not run by the second half."""
        again = {
            at
            for at, slots in fronts.items()
            if any(not self._parameters_below[below] & early for _, below in slots)
        }
        waiting = [
            below
            for slots in fronts.values()
            for _, below in slots
            if not self._parameters_below[below] & early
        ]
        while waiting:
            at = waiting.pop()
            if at not in again:
                again.add(at)
                waiting += [below for below, _, _ in self._shape[at][1]]  # type: ignore[misc]
        slots_of = ((at, saved_slots(node)) for at, node in enumerate(self._nodes))
        return tuple((at, slots) for at, slots in slots_of if slots and at not in again)

    def _tensors(self, bits: int) -> list[torch.Tensor]:
        return [p for at, p in enumerate(self._parameters) if p is not None and bits >> at & 1]


def _sort_below_first(shape: Walk) -> list[int]:
    """Return all indices, each after those below it; the roots are last."""
    found: list[int] = []
    state = [0] * len(shape)
    waiting = [len(shape) - 1]
    while waiting:
        at = waiting[-1]
        if state[at] == 0:
            state[at] = 1
            waiting += [below for below, *_ in shape[at][1] if state[below] == 0]
        else:
            waiting.pop()
            if state[at] == 1:
                state[at] = 2
                found.append(at)
    return found
