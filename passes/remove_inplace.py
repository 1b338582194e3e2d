"""Replace in-place operations by functional ones, except writes to state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.compiler.effects import (
    list_written_nodes,
    packet_name,
    remove_dead_nodes,
    state_roots,
    state_written,
    tensors_in,
    write_state_early,
)
from fxpart.compiler.functional_ops import (
    FILLING,
    METADATA_OPS,
    functional_form,
    missing_defaults,
)
from fxpart.compiler.graph_edit import add_call, describe_node, fake_mode, value
from fxpart.compiler.node_annotation import Level
from fxpart.compiler.op_behavior import StorageAnalysis, operand_nodes
from fxpart.compiler.tensor_sizes import expression
from fxpart.compiler.view_inverse import invert_view, scatter
from fxpart.errors import FxpartError, error


@dataclass(frozen=True)
class RemoveInplacePass:
    """Replace in-place ops by functional ones, with the aliasing semantics of eager execution.

    A write through a view (``x[:, 0] = 1``, ``x.t().add_(y)``) becomes a new value of the view's
    base, and every other view of it is recreated at its next use, like in autograd. Shared storage
    is observed on fake tensors. Writes to parameters and buffers (BatchNorm statistics, counters)
    remain writes; those of :func:`followed_state` become functional, and one ``copy_`` after the
    last of them stores the result. Raise FXP108 for a write without a functional form.
    """

    name: ClassVar[str] = "remove_inplace"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph in one walk."""
        graph = graph_module.graph
        if any(list_written_nodes(n) for n in graph.nodes):
            walk = StorageAnalysis(graph_module, fake_mode(graph))
            _Rewriter(graph_module, walk, followed_state(graph_module)).rewrite()
            remove_dead_nodes(graph)
            write_state_early(graph)
        return graph_module


@dataclass
class _StorageVersion:
    """One shared storage: its first value and its current value.

    version: number of writes so far. state: whether it belongs to a parameter or buffer whose
    writes remain. last: the last op that wrote to it.
    """

    base: fx.Node
    now: fx.Node
    state: bool
    version: int = 0
    last: fx.Node | None = None


@dataclass
class _ViewRecipe:
    """How to recreate a view: its op and arguments, in terms of nodes of the original graph."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: fx.Node
    version: int


@dataclass
class _Rewriter:
    """One walk over the graph that tracks storages and rewrites each node.

    followed: state whose writes become functional, with one write at the end. storages: by number.
    homes: node -> its storage. recipes: view -> how it was created and its current form. detached:
    views without gradient. renamed: node -> the node that now represents the same tensor object.
    replaced: nodes to erase once nothing refers to them.
    """

    root: fx.GraphModule
    walk: StorageAnalysis
    followed: frozenset[str] = frozenset()
    storages: dict[int, _StorageVersion] = field(default_factory=dict)
    homes: dict[fx.Node, _StorageVersion] = field(default_factory=dict)
    recipes: dict[fx.Node, _ViewRecipe] = field(default_factory=dict)
    detached: set[fx.Node] = field(default_factory=set)
    renamed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replaced: list[fx.Node] = field(default_factory=list)

    def rewrite(self) -> None:
        """Rewrite all nodes in order."""
        for node in list(self.root.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                self.walk.start(node)
                self._settle(node, (), {})
                continue
            with self.root.graph.inserting_before(node):
                self._operation(node)
        for home in self.storages.values():
            if home.base.op == "get_attr" and home.last is not None:
                with self.root.graph.inserting_before(home.last):
                    self._add(torch.ops.aten.copy_.default, (home.base, home.now), {}, home.last)
        for node in reversed(self.replaced):
            self.root.graph.erase_node(node)

    def _operation(self, node: fx.Node) -> None:
        """Update the arguments of a call or of the output, or replace an in-place call."""
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), self._resolve)
        args, kwargs = node.args, dict(node.kwargs)
        if node.op == "output":
            node.args = fx.node.map_arg(args, self.now)
            return
        targets = list_written_nodes(node)
        inner = [n for n in targets if not self._is_state(n)]
        if inner and len(targets) > 1:
            raise _refuse(node, "it writes several values at once, but not all of them are state")
        self.walk.call(node)
        if inner:
            self._check_state(node, [n for n in inner if self._is_followed(n)])
            self.replaced.append(node)
            change = self._metadata if packet_name(node.target) in METADATA_OPS else self._write
            change(node, inner[0])
            return
        self._check_state(node, targets)
        node.args, node.kwargs = fx.node.map_arg((args, kwargs), self.now)
        self._settle(node, args, kwargs)

    def _resolve(self, node: fx.Node) -> fx.Node:
        """Return the node that represents the tensor object of ``node``."""
        while node in self.renamed:
            node = self.renamed[node]
        return node

    def _is_state(self, node: fx.Node) -> bool:
        """Return whether the node's storage belongs to a parameter or buffer."""
        home = self.homes.get(node)
        return home is not None and home.state

    def _is_followed(self, node: fx.Node) -> bool:
        """Return whether the node's storage belongs to a buffer whose writes become functional."""
        home = self.homes.get(node)
        return home is not None and not home.state and home.base.op == "get_attr"

    def _settle(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the storage of a new value, and its recipe if it is a view."""
        numbers = {part.home.number for part in self.walk.parts[node]}
        if len(numbers) != 1:
            return
        number = numbers.pop()
        known = self.storages.get(number)
        if known is None:
            if isinstance(value(node), torch.Tensor):
                state = node.op == "get_attr" and str(node.target) not in self.followed
                known = _StorageVersion(node, node, state)
                self.storages[number] = self.homes[node] = known
            return
        self.homes[node] = known
        self.recipes[node] = _ViewRecipe(node.target, args, kwargs, node, known.version)
        through = [n for n in tensors_in(args) if self.homes.get(n) is known]
        cuts = packet_name(node.target) == "aten.detach"
        if cuts or any(n in self.detached for n in through):
            self.detached.add(node)

    def now(self, node: fx.Node) -> fx.Node:
        """Return the current value of a node of the original graph; a stale view is recreated."""
        home = self.homes.get(node)
        if home is None or home.state or home.version == 0:
            return node
        if node is home.base:
            return home.now
        recipe = self.recipes[node]
        if recipe.version != home.version:
            recipe.node = self._fresh(node, {})[node]
            recipe.version = home.version
        return recipe.node

    def _fresh(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Recreate all views from the base to ``node``; return them by original node.

        They are not shared with other views, like in eager execution, so that autograd accumulates
        gradients in the same order.
        """
        home = self.homes[node]

        def fresh(source: fx.Node) -> fx.Node:
            if self.homes.get(source) is not home:
                return self.now(source)
            return self._fresh(source, made)[source]

        if node is home.base:
            made[node] = home.now
        elif node not in made:
            recipe = self.recipes[node]
            args, kwargs = fx.node.map_arg((recipe.args, recipe.kwargs), fresh)
            made[node] = self._add(recipe.target, args, kwargs, node)
        return made

    def _add(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node
    ) -> fx.Node:
        """Add a call before the node that is being rewritten."""
        return add_call(self.root.graph, target, args, kwargs, like=like, mode=self.walk.mode)

    def _metadata(self, node: fx.Node, target: fx.Node) -> None:
        """Replace ops such as ``squeeze_``, which change one tensor object, by a view."""
        form = functional_form(node.target)
        if form is None:
            raise _refuse(node, f"{node.target} has no functional form")
        args, kwargs = (target, *node.args[1:]), dict(node.kwargs)
        view = self._add(form, *fx.node.map_arg((args, kwargs), self.now), like=node)
        # The walk reads the op's original arguments, before any write.
        same = self.walk.parts[target][0].thing
        view.args, view.kwargs, current = args, kwargs, (view.args, view.kwargs)
        self.walk.call(view)
        view.args, view.kwargs = current
        self._settle(view, args, kwargs)
        for other, parts in self.walk.parts.items():
            if other is not view and [part.thing for part in parts] == [same]:
                self.renamed[other] = view

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        """Compute the new value of an in-place op, and store it through the views."""
        chain = self._fresh(target, {})
        args, kwargs = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda n: chain[n] if n is target else self.now(n)
        )
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        old = chain[target]
        whole = target is self.homes[target].base
        if packet_name(node.target) == "aten.copy_":
            new = self._copied(args[1], old, node, whole)
        else:
            form = functional_form(node.target)
            if form is None:
                raise _refuse(node, f"{node.target} has no functional form")
            if packet_name(node.target) == "aten.zero_":
                args = (*args, 0)
            args += missing_defaults(node.target, form, args, kwargs)
            fills = packet_name(node.target) in FILLING and self.walk.parts[target][0].grad
            if fills:
                args = (self._add(torch.ops.aten.detach.default, (old,), {}, node), *args[1:])
            new = self._cast(self._add(form, args, kwargs, node), old, node)
            new = self._layout(new, old, node, always=fills)
        self._store(target, new, chain, node)
        if self.walk.behavior(node).after[operand_nodes(node).index(target)]:
            self._carry_gradient(self.homes[target])
        # Autograd recreates the written view immediately, all others at their next use.
        self.now(target)
        self.renamed[node] = target

    def _copied(self, source: Any, old: fx.Node, like: fx.Node, whole: bool) -> fx.Node:
        """Return the result of ``old.copy_(source)``; never a view of the source."""
        new = self._add(torch.ops.aten.expand_as.default, (source, old), {}, like)
        new = self._cast(new, old, like)
        if whole and value(old).dim() == 0:
            return self._add(torch.ops.aten.clone.default, (new,), {}, like)
        return self._layout(new, old, like, always=whole)

    def _cast(self, new: fx.Node, old: fx.Node, like: fx.Node) -> fx.Node:
        """Cast to the dtype of the written tensor, which in-place ops keep."""
        if value(new).dtype == value(old).dtype:
            return new
        return self._add(torch.ops.aten.to.dtype, (new, value(old).dtype), {}, like)

    def _layout(
        self, new: fx.Node, old: fx.Node, like: fx.Node, *, always: bool = False
    ) -> fx.Node:
        """Restore the strides of the written tensor, which set the summation order of later ops."""
        a, b = value(new), value(old)
        same = tuple(map(expression, a.stride())) == tuple(map(expression, b.stride()))
        if b.dim() == 0 or (same and not always):
            return new

        def add(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
            return self._add(op, args, kwargs, like)

        everything = (0, 0, torch.iinfo(torch.int64).max)
        return scatter(add, torch.ops.aten.slice_scatter.default, old, new, *everything)

    def _store(
        self, target: fx.Node, new: fx.Node, chain: Mapping[fx.Node, fx.Node], like: fx.Node
    ) -> None:
        """Create a new version of the storage, in which ``target`` has the value ``new``.

        chain: the views from the base to the target, before the write.
        """
        home = self.homes[target]
        current = target

        def add(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
            return self._add(op, args, kwargs, like)

        while current is not home.base:
            recipe = self.recipes[current]
            parent, inverse = invert_view(recipe.target, recipe.args, recipe.kwargs, self.recipes)
            if inverse is None or not isinstance(parent, fx.Node):
                raise _refuse(like, f"it writes through {recipe.target}, which has no inverse")
            if packet_name(recipe.target) == "aten.detach" and self.walk.parts[parent][0].grad:
                raise _refuse(
                    like,
                    "it writes to a value that requires a gradient unknown to autograd "
                    "(under torch.no_grad(), or through .data or .detach())",
                )
            old = chain[parent]
            new = self._layout(inverse(add, old, new), old, like)
            current = parent
        home.now, home.last = new, like
        home.version += 1

    def _carry_gradient(self, home: _StorageVersion) -> None:
        """After a write with a gradient, mark all views that are not detached."""
        for node, other in self.homes.items():
            if other is home and node not in self.detached:
                self.walk.parts[node] = [replace(p, grad=True) for p in self.walk.parts[node]]

    def _check_state(self, node: fx.Node, targets: Sequence[fx.Node]) -> None:
        """Raise FXP108 if a value with a gradient is written to state, which outlives the step."""
        if not targets:
            return
        operands = operand_nodes(node)
        after = self.walk.behavior(node).after
        for target in targets:
            if after[operands.index(target)]:
                name = self.homes[target].base.target
                raise _refuse(
                    node, f"it writes a value that requires a gradient to the state {name}"
                )


def _refuse(node: fx.Node, why: str) -> FxpartError:
    """Return FXP108 at the node's source line."""
    return error(
        "FXP108",
        where=describe_node(node),
        why=f"{node.target}: {why}",
        fix="write the new value to a new tensor instead (y = x * 2, torch.where, torch.cat); "
        "for state, compute the new value under torch.no_grad()",
    )


def followed_state(module: fx.GraphModule) -> frozenset[str]:
    """Return the buffers that are written repeatedly, through a view, or that other ops read.

    Such writes rely on shared storage, which sharded values do not keep. A buffer that a single op
    writes directly, and that no other op reads, needs no tracking. A parameter cannot be tracked
    because its gradient belongs to the tensor itself, nor can a buffer that an op writes as a side
    effect (batch_norm).
    """
    graph = module.graph
    roots = state_roots(graph)
    writers: dict[str, list[fx.Node]] = {}
    for node, names in state_written(graph).items():
        for name in names:
            writers.setdefault(name, []).append(node)
    found = set()
    for name, ops in writers.items():
        shared = len(graph.find_nodes(op="get_attr", target=name)) > 1
        if shared or _is_trained(module, name) or not all(_can_follow(op, roots) for op in ops):
            continue
        direct = len(ops) == 1 and list_written_nodes(ops[0])[0].op == "get_attr"
        if not direct or set(_readers(graph, roots, name)) != set(ops):
            found.add(name)
    return frozenset(found)


def _is_trained(module: fx.GraphModule, name: str) -> bool:
    return bool(attrgetter(name)(module).requires_grad)


def _can_follow(op: fx.Node, roots: dict[fx.Node, frozenset[str]]) -> bool:
    """Return whether an op writes only one piece of state and has a functional form."""
    targets = list_written_nodes(op)
    plain = packet_name(op.target) == "aten.copy_" or functional_form(op.target) is not None
    single = len(targets) == 1 and len(roots[targets[0]]) == 1
    return plain and single and packet_name(op.target) not in METADATA_OPS


def _readers(graph: fx.Graph, roots: dict[fx.Node, frozenset[str]], name: str) -> Iterator[fx.Node]:
    """Yield the nodes with an operand that may alias the state."""
    for node in graph.nodes:
        if any(name in roots[source] for source in node.all_input_nodes):
            yield node
