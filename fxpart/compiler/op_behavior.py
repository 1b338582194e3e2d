"""Storage and gradient behavior of each op of a graph, observed once per kind of call.

An op runs on fake operands with gradients enabled and saved-tensor hooks installed. Calls with
equal op, arguments, shapes, strides and gradients share one observation, so 96 equal layers cost as
much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fxpart.compat import disable_guards, python_dispatcher, silence_fake_errors
from fxpart.compiler.collective_calls import (
    bind_fake_communicator,
    is_collective,
    is_random_shard,
)
from fxpart.compiler.effects import is_op, list_written_nodes, op_args, op_of
from fxpart.compiler.graph_edit import describe_node, value
from fxpart.compiler.kernel_memory import lstm_saved, result_bytes
from fxpart.compiler.node_annotation import MESH_KEY, MESH_RANK_KEY, OpWorkspace
from fxpart.compiler.observation_cache import get_observations, is_reusable_size
from fxpart.compiler.op_workspace import (
    MeasuredWorkspace,
    PeakMemoryMode,
    SavedTensors,
    backward_working,
    convolution,
)
from fxpart.compiler.sparse_lookups import row_bytes, sparse_lookup
from fxpart.compiler.tensor_sizes import expression, nbytes, tensors
from fxpart.errors import error

Size: TypeAlias = int | sympy.Expr
BEHAVIORS_KEY = "fxpart_behaviors"


@dataclass(frozen=True)
class GraphStorage:
    """A storage: its number, its bytes and the node that allocates it ("" inside an op)."""

    number: int
    size: Size
    source: str
    state: bool = False


@dataclass(frozen=True)
class ValueTensor:
    """One tensor of a node's value: whether it requires a gradient, its storage and its identity.

    thing: equal for tensors that are the same Python object because an op returned its operand.
    """

    grad: bool
    home: GraphStorage
    thing: int


@dataclass(frozen=True)
class CallTensorRef:
    """A tensor of a call, relative to the call: operand i, result i, or private bytes."""

    kind: str
    index: int = 0
    size: Size = 0


@dataclass(frozen=True)
class OpBehavior:
    """Observed behavior of one kind of call.

    For each result tensor: gradient, aliased storage, aliased object and storage bytes. For each
    operand tensor: whether it requires a gradient afterwards. Also the saved tensors and the
    temporary memory.
    """

    grads: tuple[bool, ...]
    homes: tuple[CallTensorRef, ...]
    things: tuple[int | None, ...]
    sizes: tuple[Size, ...]
    after: tuple[bool, ...]
    saved: tuple[CallTensorRef, ...]
    working: MeasuredWorkspace = field(default_factory=MeasuredWorkspace)

    def every_size(self) -> list[Size]:
        """Return all sizes in this record."""
        working = (self.working.forward, self.working.backward)
        return [*self.sizes, *(link.size for link in (*self.homes, *self.saved)), *working]


@dataclass
class StorageAnalysis:
    """Storage and gradient analysis of a graph, node by node in order.

    parts: tensors of each node. known: behavior by signature, stored in the graph's meta so that
    all passes of one pipeline share it.
    """

    root: fx.GraphModule
    mode: AbstractContextManager[Any]
    parts: dict[fx.Node, list[ValueTensor]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        """Load the observations of earlier passes."""
        self.known: dict[Hashable, OpBehavior] = self.root.meta.setdefault(BEHAVIORS_KEY, {})
        self._shared: dict[Hashable, OpBehavior] = get_observations(self.mode)

    def start(self, node: fx.Node) -> None:
        """Add an input or a state tensor, which has its own storage."""
        state = node.op == "get_attr"
        attribute = attrgetter(str(node.target))(self.root) if state else None
        grad = bool(getattr(attribute, "requires_grad", False))
        self.parts[node] = [
            ValueTensor(grad, self.new_home(expression(nbytes(t)), node.name, state), self._next())
            for t in tensors(value(node))
        ]

    def call(self, node: fx.Node) -> tuple[GraphStorage, ...]:
        """Add an op and the tensors of its result; return the storages that autograd saves."""
        if not is_op(op_of(node)) and not is_collective(node.target):
            self.parts[node] = self._item(node)
            return ()
        operands = operand_nodes(node)
        flat = [part for n in operands for part in self.parts[n]]
        behavior = self.behavior(node)
        results: list[ValueTensor] = []
        for index, link in enumerate(behavior.homes):
            if link.kind == "operand":
                home = flat[link.index].home
            elif link.index < index:
                home = results[link.index].home
            else:
                home = self.new_home(behavior.sizes[index], node.name)
            same = behavior.things[index]
            thing = self._next() if same is None else flat[same].thing
            results.append(ValueTensor(behavior.grads[index], home, thing))
        self.parts[node] = results
        kept: dict[int, GraphStorage] = {}
        for link in behavior.saved:
            if link.kind == "private":
                home = self.new_home(link.size, "")
            else:
                home = (flat if link.kind == "operand" else results)[link.index].home
            kept.setdefault(home.number, home)
        return tuple(kept.values())

    def working(self, node: fx.Node) -> OpWorkspace:
        """Return the temporary memory of an op; call it after :meth:`call`."""
        if not is_op(op_of(node)) and not is_collective(node.target):
            return OpWorkspace()
        found = self.behavior(node).working
        names = [n.name for n in operand_nodes(node) for _ in self.parts[n]]
        through = tuple(names[index] for index in found.through)
        return OpWorkspace(found.forward, found.backward, through)

    def behavior(self, node: fx.Node) -> OpBehavior:
        """Return the behavior of the node's call, observed once per signature."""
        signature = self._signature(node)
        if signature not in self.known:
            found = self._shared.get(signature)
            if found is None:
                found = self._observe(node)
                if is_reusable_size(found.every_size(), signature):
                    self._shared[signature] = found
            self.known[signature] = found
        return self.known[signature]

    def new_home(self, size: Size, source: str, state: bool = False) -> GraphStorage:
        """Return a new storage."""
        return GraphStorage(self._next(), size, source, state)

    def _next(self) -> int:
        self.count += 1
        return self.count

    def _item(self, node: fx.Node) -> list[ValueTensor]:
        """Return the tensors that getitem selects; size computations have no tensors."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not tensors(value(node)):
            return []
        index = node.args[1]
        assert isinstance(index, int), f"{describe_node(node)} must index with an integer"
        counts = [len(tensors(item)) for item in value(source)]
        first = sum(counts[: index % len(counts)])
        return self.parts[source][first : first + counts[index % len(counts)]]

    def _signature(self, node: fx.Node) -> Hashable:
        """Return a key of a call: op, arguments, shapes, gradients and aliases."""
        seen: dict[int, int] = {}

        def describe(item: Any) -> Hashable:
            if isinstance(item, fx.Node):
                item_tensors = tensors(value(item))
                if not item_tensors:
                    number = value(item)
                    is_symbol = isinstance(number, torch.SymInt)
                    return ("number", expression(number) if is_symbol else str(number))
                return tuple(
                    (_meta(t), part.grad, seen.setdefault(part.home.number, len(seen)))
                    for t, part in zip(item_tensors, self.parts[item], strict=True)
                )
            if isinstance(item, (list, tuple)):
                return ("list", *(describe(i) for i in item))
            if isinstance(item, dict):
                return ("dict", *((k, describe(v)) for k, v in sorted(item.items())))
            return (type(item).__name__, str(item))

        op, args = called(node)
        mesh_rank = (
            (self.root.meta[MESH_KEY], self.root.meta[MESH_RANK_KEY]) if is_collective(op) else ()
        )
        return (op, describe(args), describe(dict(node.kwargs)), mesh_rank)

    def _observe(self, node: fx.Node) -> OpBehavior:
        """Run the op on fake operands and record storages and saved tensors."""
        op, args = called(node)
        given: dict[fx.Node, Any] = {}
        targets = list_written_nodes(node)
        for n in operand_nodes(node):
            grads = iter([part.grad for part in self.parts[n]])
            given[n] = _rebuild(value(n), grads, self.mode, n in targets)
        inputs = [t for item_tensors in given.values() for t in tensors(item_tensors)]
        saved = SavedTensors()
        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), lambda n: given.get(n, value(n)))
        op = self._runnable(op)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
        watch = PeakMemoryMode()
        with self.mode, disable_guards(self.mode), torch.enable_grad(), hooks:
            with watch:
                result = _run(node, lambda: op(*args, **kwargs), saved)
            outputs = tensors(result)
            beside = watch.beside()
        name = ".".join(str(op_of(node)).split(".")[:2])
        found = _relate(
            inputs,
            outputs,
            saved.tensors,
            [result_bytes(name, index, t) for index, t in enumerate(outputs)],
            lstm_saved(args, kwargs) if name == "aten.lstm" else None,
        )
        lookup = sparse_lookup(node)
        back: Size
        through: tuple[int, ...] = ()
        if lookup is not None:  # sparse gradient: looked-up rows and their indices
            back = row_bytes(*lookup)
        else:
            with self.mode, disable_guards(self.mode):
                back, through = backward_working(inputs, outputs, saved)
        if "conv" in name and len(inputs) > 1 and inputs[0].device.type == "cpu":
            beside, back = convolution(inputs, outputs)
        return replace(found, working=MeasuredWorkspace(beside, back, through))

    def _runnable(self, op: Any) -> Any:
        """Return the op; collectives get a fake communicator that computes shapes only."""
        if not is_collective(op):
            return op
        return bind_fake_communicator(op, self.root.meta[MESH_KEY], self.root.meta[MESH_RANK_KEY])


def _run(node: fx.Node, call: Callable[[], Any], saved: SavedTensors) -> Any:
    """Run the op; fall back to the Python decomposition if its C++ kernel needs concrete sizes."""
    try:
        with silence_fake_errors():
            return call()
    except RuntimeError as first:
        saved.clear()
        try:
            with python_dispatcher():
                return call()
        except RuntimeError:
            raise error(
                "FXP108",
                where=describe_node(node),
                why=f"{op_of(node)} fails on fake tensors: {str(first).splitlines()[0]}",
                fix="rewrite it with other torch operations, or move it out of the model",
            ) from first


def _relate(
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    packed: list[torch.Tensor],
    result_sizes: list[Size],
    known: tuple[tuple[str, int, Size], ...] | None,
) -> OpBehavior:
    """Relate results and saved tensors to operands and results by storage.

    made: bytes of the results. known: the saved tensors if the fake operands do not show them.
    """
    # torch reuses the Python object of a storage while a reference exists, so keep all of them.
    storages = [t.untyped_storage() for t in (*inputs, *outputs, *packed)]
    firsts: dict[int, int] = {}
    for position, item_tensors in enumerate(storages):
        firsts.setdefault(id(item_tensors), position)
    ends = len(inputs), len(inputs) + len(outputs)

    def link(tensor: torch.Tensor) -> CallTensorRef:
        position = firsts[id(tensor.untyped_storage())]
        if position < ends[0]:
            return CallTensorRef("operand", position)
        if position < ends[1]:
            return CallTensorRef("result", position - ends[0])
        return CallTensorRef("private", position - ends[1], expression(nbytes(tensor)))

    return OpBehavior(
        grads=tuple(t.requires_grad for t in outputs),
        homes=tuple(link(t) for t in outputs),
        things=tuple(next((i for i, x in enumerate(inputs) if x is t), None) for t in outputs),
        sizes=tuple(result_sizes),
        after=tuple(t.requires_grad for t in inputs),
        saved=tuple(
            dict.fromkeys(link(t) for t in packed)
            if known is None
            else (CallTensorRef(kind, index, size) for kind, index, size in known)
        ),
    )


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the callable and its arguments; the index of a random call is replaced by 0.

    ``random_shard`` itself is returned, since it may draw the whole tensor.
    """
    if not is_random_shard(node.target):
        return op_of(node), op_args(node)
    shape, placements, key, _, *rest = node.args
    return node.target, (shape, placements, key, 0, *rest)


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes with tensors among the op's arguments, each once, in order of appearance."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg((op_args(node), dict(node.kwargs)), lambda n: found.setdefault(n))
    return [n for n in found if tensors(value(n))]


def _rebuild(
    template: Any, grads: Iterator[bool], mode: AbstractContextManager[Any], is_written: bool
) -> Any:
    """Return fresh fake tensors in the same nesting with the given gradient flags.

    torch forbids in-place ops on a leaf that requires a gradient, so a written tensor is not a
    leaf.
    """
    if isinstance(template, torch.Tensor):
        with mode:
            fake = torch.empty_strided(
                template.size(),
                template.stride(),
                dtype=template.dtype,
                device=template.device,
            )
            if not next(grads):
                return fake
            fake.requires_grad_()
            return fake.clone() if is_written else fake
    if isinstance(template, (list, tuple)):
        return [_rebuild(item, grads, mode, is_written) for item in template]
    return template


def _meta(t: torch.Tensor) -> Hashable:
    """Return the properties of a tensor that determine op behavior."""
    shape = tuple(expression(s) for s in t.shape)
    return (shape, tuple(expression(s) for s in t.stride()), t.dtype, t.device)
