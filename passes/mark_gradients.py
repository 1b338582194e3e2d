"""Find which values carry a gradient, and what autograd keeps for the backward of each op."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.errors import error
from fxpart.pipeline.abstract import stand_in, storage, tensors, wants_gradient
from fxpart.pipeline.annotation import Level, Saved
from fxpart.pipeline.edit import annotate, fake_mode, place, value
from fxpart.pipeline.effects import is_op, op_args, op_of
from fxpart.pipeline.sizes import expression


@dataclass(frozen=True)
class MarkGradients:
    """Set ``Annotation.requires_grad`` on every value and ``Annotation.saved`` on every op.

    Each distinct op (same arguments, shapes, strides and gradients) runs once on fake tensors under
    ``torch.autograd.graph.saved_tensors_hooks``; repeats are looked up, so that 96 equal layers
    cost one. Parameters and buffers are not counted. Sizes are whole storages in bytes, sympy
    expressions where the batch is symbolic.
    """

    name: ClassVar[str] = "mark_gradients"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Annotate all nodes in one walk."""
        walk = _Walk(graph_module, fake_mode(graph_module.graph))
        for node in graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                walk.start(node)
            elif node.op == "call_function":
                walk.call(node)
        return graph_module


@dataclass(frozen=True)
class _Kept:
    """One saved tensor of an op, relative to it: an operand or result by number, or private bytes."""

    kind: str
    index: int
    size: Any = 0


@dataclass(frozen=True)
class _Effect:
    """What one op does: per result tensor its gradient and home, and what is saved.

    homes: ("operand", i) if the result lies in operand i's storage, ("result", j) if in that of
    result j (itself for a new storage). sizes: bytes of each result's storage.
    """

    grads: tuple[bool, ...]
    homes: tuple[tuple[str, int], ...]
    sizes: tuple[Any, ...]
    saved: tuple[_Kept, ...]


@dataclass(frozen=True)
class _Home:
    """A storage of the graph: its number (-1 for state), size in bytes, and the node that made it."""

    number: int
    size: Any
    source: str


_STATE = _Home(-1, 0, "")


@dataclass
class _Walk:
    """One walk: per node the gradient and home of each of its tensors, and effects by signature."""

    root: fx.GraphModule
    mode: AbstractContextManager[Any]
    parts: dict[fx.Node, list[tuple[bool, _Home]]] = field(default_factory=dict)
    known: dict[Hashable, _Effect] = field(default_factory=dict)
    count: int = 0

    def start(self, node: fx.Node) -> None:
        """An input or a piece of state."""
        grad = node.op == "get_attr" and wants_gradient(node, self.root)
        if node.op == "get_attr":
            self.parts[node] = [(grad, _STATE)]
        else:
            held = tensors(value(node))
            self.parts[node] = [(False, self._new(expression(_nbytes(t)), node.name)) for t in held]
        annotate(node, requires_grad=grad)

    def _new(self, size: Any, source: str) -> _Home:
        """A storage that nobody has yet."""
        self.count += 1
        return _Home(self.count - 1, size, source)

    def call(self, node: fx.Node) -> None:
        """One op: look its effect up or find it, and apply it here."""
        if not is_op(op_of(node)):
            self._plain(node)
            return
        operands = [n for n in _operands(node) if tensors(value(n))]
        flat = [part for n in operands for part in self.parts[n]]
        signature = self._signature(node)
        if signature not in self.known:
            self.known[signature] = self._find(node, operands)
        effect = self.known[signature]
        homes: list[_Home] = []
        for index, (kind, number) in enumerate(effect.homes):
            if kind == "operand":
                homes.append(flat[number][1])
            elif number < index:
                homes.append(homes[number])
            else:
                homes.append(self._new(effect.sizes[index], node.name))
        self.parts[node] = list(zip(effect.grads, homes, strict=True))
        annotate(
            node,
            requires_grad=any(effect.grads),
            saved=self._saved(effect, flat, homes),
        )

    def _plain(self, node: fx.Node) -> None:
        """getitem on a list of tensors, or arithmetic with sizes."""
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and tensors(value(node)):
            index = node.args[1]
            assert isinstance(index, int), f"{place(node)} takes one item"
            held = [len(tensors(item)) for item in value(source)]
            first = sum(held[: index % len(held)])
            self.parts[node] = self.parts[source][first : first + held[index % len(held)]]
        else:
            self.parts[node] = []
        annotate(node, requires_grad=any(g for g, _ in self.parts[node]))

    def _saved(
        self, effect: _Effect, flat: list[tuple[bool, _Home]], homes: list[_Home]
    ) -> tuple[Saved, ...]:
        """What the op keeps, as storages of the graph, each once, without state."""
        found: dict[int, Saved] = {}
        for kept in effect.saved:
            if kept.kind == "private":
                home = self._new(kept.size, "")
            else:
                home = flat[kept.index][1] if kept.kind == "operand" else homes[kept.index]
            if home is not _STATE:
                found.setdefault(home.number, Saved(home.number, home.size, home.source))
        return tuple(found.values())

    def _signature(self, node: fx.Node) -> Hashable:
        """Equal for nodes with the same effect: op, arguments, and per tensor shape and gradient."""
        seen: dict[int, int] = {}

        def describe(item: Any) -> Hashable:
            if isinstance(item, fx.Node):
                held = value(item)
                if not tensors(held):
                    return ("number", str(held))
                parts = self.parts[item]
                return tuple(
                    (
                        _meta(t),
                        grad,
                        seen.setdefault(id(home), len(seen)) if home is not _STATE else -1,
                    )
                    for t, (grad, home) in zip(tensors(held), parts, strict=True)
                )
            if isinstance(item, (list, tuple)):
                return ("list", *(describe(i) for i in item))
            if isinstance(item, dict):
                return ("dict", *((k, describe(v)) for k, v in sorted(item.items())))
            return (type(item).__name__, str(item))

        return (op_of(node), describe(op_args(node)), describe(dict(node.kwargs)))

    def _find(self, node: fx.Node, operands: list[fx.Node]) -> _Effect:
        """Run the op on stand-ins and watch what it saves."""
        given: dict[fx.Node, Any] = {}
        for n in operands:
            made = iter(self.parts[n])
            given[n] = _rebuild(
                value(n), lambda t, made=made: stand_in(t, next(made)[0], self.mode)
            )
        inputs = [t for n in operands for t in tensors(given[n])]
        packed: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append(t)
            return t

        args, kwargs = fx.node.map_arg(
            (op_args(node), dict(node.kwargs)), lambda n: given.get(n, value(n))
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        # Stand-ins that the op writes (a buffer) must not be leaves that want a gradient; they are not.
        with self.mode, torch.enable_grad(), hooks:
            try:
                result = op_of(node)(*args, **kwargs)
            except RuntimeError as cause:
                raise error(
                    "FXP900", where=place(node), why=f"it fails on fake tensors: {cause}"
                ) from cause
        return _effect(inputs, tensors(result), packed)


def _effect(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor], packed: list[torch.Tensor]
) -> _Effect:
    """Relate results and saved tensors to operands and results by storage."""
    helds = [storage(t) for t in (*inputs, *outputs)]
    firsts: dict[int, int] = {}
    for position, held in enumerate(helds):
        firsts.setdefault(id(held), position)
    count = len(inputs)

    def home(held: torch.UntypedStorage) -> tuple[str, int] | None:
        position = firsts.get(id(held))
        if position is None:
            return None
        return ("operand", position) if position < count else ("result", position - count)

    saved: dict[int, _Kept] = {}
    keep_alive = []
    for t in packed:
        held = storage(t)
        keep_alive.append(held)
        at = home(held)
        if at is None:
            saved.setdefault(id(held), _Kept("private", 0, expression(_nbytes(t))))
        else:
            saved.setdefault(id(held), _Kept(*at))
    homes = tuple(h for t in outputs if (h := home(storage(t))) is not None)
    return _Effect(
        grads=tuple(t.requires_grad for t in outputs),
        homes=homes,
        sizes=tuple(expression(_nbytes(t)) for t in outputs),
        saved=tuple(saved.values()),
    )


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the op's arguments in order of appearance, each as often as it appears."""
    found: list[fx.Node] = []
    fx.node.map_arg((op_args(node), dict(node.kwargs)), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return list(dict.fromkeys(found))


def _rebuild(held: Any, make: Any) -> Any:
    """The same nesting with every tensor replaced."""
    if isinstance(held, torch.Tensor):
        return make(held)
    if isinstance(held, (list, tuple)):
        return type(held)(_rebuild(item, make) for item in held)
    return held


def _nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the tensor's whole storage."""
    return tensor.untyped_storage().nbytes()


def _meta(t: torch.Tensor) -> Hashable:
    """What of a tensor decides an op's effect."""
    return (
        tuple(map(str, t.shape)),
        tuple(map(str, t.stride())),
        t.dtype,
        t.device,
    )
