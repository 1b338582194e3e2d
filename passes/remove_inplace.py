"""Turn in-place operations into functional ones; writes to state stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.errors import FxpartError, error
from fxpart.pipeline.abstract import leaf, storage, tensors
from fxpart.pipeline.annotation import Level
from fxpart.pipeline.edit import add_call, fake_mode, place, value
from fxpart.pipeline.effects import packet_name, sweep, written
from fxpart.pipeline.functional import METADATA_OPS, functional_form
from fxpart.pipeline.view_inverse import put_back


@dataclass(frozen=True)
class RemoveInplace:
    """Functional ops instead of in-place ones, with the aliasing that eager execution has.

    A write through a view (``x[:, 0] = 1``, ``x.t().add_(y)``) becomes a new value of the view's
    base, and every other view of it is taken anew where it is used next, as autograd does. Which
    values share storage is observed on fake tensors. Writes to parameters and buffers (BatchNorm's
    statistics, counters) stay real writes. FXP108 where a write has no functional form.
    """

    name: ClassVar[str] = "remove_inplace"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph in one walk."""
        graph = graph_module.graph
        if any(written(n) for n in graph.nodes):
            _Rewriter(graph_module, fake_mode(graph)).rewrite()
            sweep(graph)
        return graph_module


@dataclass
class _Storage:
    """One storage that values share: its first value and what that value has become.

    version: number of writes so far. state: it is a parameter's or buffer's.
    """

    held: torch.UntypedStorage
    base: fx.Node
    now: fx.Node
    state: bool
    version: int = 0


@dataclass
class _Recipe:
    """How to take a view anew: its op and arguments, in terms of nodes of the given graph."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: fx.Node
    version: int


@dataclass
class _Rewriter:
    """One walk over the graph: executes each node on fake tensors and rewrites it.

    trace: node -> fake value. homes: node -> the storage it lies in. recipes: view -> how it was
    made and its present form. renamed: node -> the node that stands for the same tensor object now.
    replaced: in-place nodes, to be erased once nothing refers to them.
    """

    root: fx.GraphModule
    mode: AbstractContextManager[Any]
    trace: dict[fx.Node, Any] = field(default_factory=dict)
    storages: dict[int, _Storage] = field(default_factory=dict)
    homes: dict[fx.Node, _Storage] = field(default_factory=dict)
    recipes: dict[fx.Node, _Recipe] = field(default_factory=dict)
    renamed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replaced: list[fx.Node] = field(default_factory=list)

    def rewrite(self) -> None:
        """All nodes in order."""
        for node in list(self.root.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                self.trace[node] = leaf(node, self.root, self.mode)
                self._settle(node)
                continue
            with self.root.graph.inserting_before(node):
                self._operation(node)
        for node in reversed(self.replaced):
            self.root.graph.erase_node(node)

    def _operation(self, node: fx.Node) -> None:
        """A call or the output: bring its arguments up to date, or replace it."""
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), self._resolve)
        given = (node.args, dict(node.kwargs))
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, self.now)
            return
        targets = written(node)
        inner = [n for n in targets if not self._is_state(n)]
        if inner and len(targets) > 1:
            raise _refuse(node, "it writes several values at once, and not all of them are state")
        if inner:
            self.replaced.append(node)
        if packet_name(node.target) in METADATA_OPS and inner:
            self._metadata(node, inner[0])
        elif inner:
            self._write(node, inner[0])
        else:
            node.args, node.kwargs = fx.node.map_arg(given, self.now)
            self._execute(node, given)
            self._check_state(node, targets)
            self._settle(node, given)

    def _resolve(self, node: fx.Node) -> fx.Node:
        """The node that stands for the tensor object that ``node`` was."""
        while node in self.renamed:
            node = self.renamed[node]
        return node

    def _is_state(self, node: fx.Node) -> bool:
        """Whether the node's storage is a parameter's or buffer's."""
        home = self.homes.get(node)
        return home is not None and home.state

    def _execute(self, node: fx.Node, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Run the op as it was written, on the fake tensors."""
        args, kwargs = fx.node.map_arg(given, self.trace.__getitem__)
        with self.mode, torch.enable_grad():
            self.trace[node] = node.target(*args, **kwargs)

    def _settle(
        self, node: fx.Node, given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> None:
        """Note in which storage a new value lies, and its recipe if it is a view."""
        parts = tensors(self.trace[node])
        helds = [storage(t) for t in parts]
        if not parts or any(h is not helds[0] for h in helds):
            return
        known = self.storages.get(id(helds[0]))
        if known is None:
            if isinstance(self.trace[node], torch.Tensor):
                known = _Storage(helds[0], node, node, node.op == "get_attr")
                self.storages[id(helds[0])] = self.homes[node] = known
            return
        self.homes[node] = known
        if given is not None:
            self.recipes[node] = _Recipe(node.target, *given, node, known.version)

    def now(self, node: fx.Node) -> fx.Node:
        """The present value of a node of the given graph: views of written storage are taken anew."""
        home = self.homes.get(node)
        if home is None or home.state or home.version == 0:
            return node
        if node is home.base:
            return home.now
        recipe = self.recipes[node]
        if recipe.version != home.version:
            args, kwargs = fx.node.map_arg((recipe.args, recipe.kwargs), self.now)
            recipe.node = self._add(recipe.target, args, kwargs, node)
            recipe.version = home.version
        return recipe.node

    def _add(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node
    ) -> fx.Node:
        """A new call before the node that is being rewritten."""
        return add_call(self.root.graph, target, args, kwargs, like=like, mode=self.mode)

    def _metadata(self, node: fx.Node, target: fx.Node) -> None:
        """``squeeze_`` and the like change one tensor object only: it becomes a view of itself."""
        op = functional_form(node.target)
        if op is None:
            raise _refuse(node, f"{node.target} has no functional form")
        given = ((target, *node.args[1:]), dict(node.kwargs))
        before = self.trace[target]
        args, kwargs = fx.node.map_arg(given, self.now)
        view = self._add(op, args, kwargs, node)
        args, kwargs = fx.node.map_arg(given, self.trace.__getitem__)
        with self.mode, torch.enable_grad():
            self.trace[view] = op(*args, **kwargs)
        self._settle(view, given)
        for other in [n for n, held in self.trace.items() if held is before]:
            self.renamed[other] = view
        self.renamed[node] = view

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        """An in-place op on a value: compute the new value, and store it through the views."""
        form = functional_form(node.target)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.now)
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        old = self.now(target)
        if packet_name(node.target) == "aten.copy_":
            source = args[1]
            new = self._add(torch.ops.aten.expand_as.default, (source, old), {}, node)
            new = self._cast(new, old, node)
            if value(old).dim() == 0 and target is self.homes[target].base:
                new = self._add(torch.ops.aten.clone.default, (new,), {}, node)
            else:
                new = self._layout(new, old, node, always=target is self.homes[target].base)
        elif form is None:
            raise _refuse(node, f"{node.target} has no functional form")
        else:
            if packet_name(node.target) == "aten.zero_":
                args = (*args, 0)
            new = self._add(form, args, kwargs, node)
            new = self._layout(self._cast(new, old, node), old, node)
        self._store(target, new, node)
        self._execute(node, (node.args, dict(node.kwargs)))
        self.renamed[node] = target

    def _cast(self, new: fx.Node, old: fx.Node, like: fx.Node) -> fx.Node:
        """In-place ops keep the dtype of what they write."""
        if value(new).dtype == value(old).dtype:
            return new
        return self._add(torch.ops.aten.to.dtype, (new, value(old).dtype), {}, like)

    def _layout(
        self, new: fx.Node, old: fx.Node, like: fx.Node, *, always: bool = False
    ) -> fx.Node:
        """In-place ops keep strides, and strides decide the order in which later ops add up."""
        a, b = value(new), value(old)
        same = tuple(map(str, a.stride())) == tuple(map(str, b.stride()))
        if b.dim() == 0 or (same and not always):
            return new
        everything = (old, new, 0, 0, torch.iinfo(torch.int64).max)
        return self._add(torch.ops.aten.slice_scatter.default, everything, {}, like)

    def _store(self, target: fx.Node, new: fx.Node, like: fx.Node) -> None:
        """Give the storage a new version, in which ``target`` has the value ``new``."""
        home = self.homes[target]
        current = target
        while current is not home.base:
            recipe = self.recipes[current]
            if packet_name(recipe.target) == "aten.detach":
                self._check_detached(recipe.args[0], like)
            parent, inverse = put_back(recipe.target, recipe.args, recipe.kwargs, self.recipes)
            if inverse is None or not isinstance(parent, fx.Node):
                raise _refuse(like, f"it writes through {recipe.target}, which cannot be undone")
            old = self.now(parent)

            def add(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
                return self._add(op, args, kwargs, like)

            new = self._layout(inverse(add, old, new), old, like)
            current = parent
        home.now = new
        home.version += 1

    def _check_detached(self, parent: fx.Node, like: fx.Node) -> None:
        """A write behind autograd's back, into a value that carries a gradient, has no functional form."""
        if self.trace[parent].requires_grad:
            raise _refuse(
                like,
                "it writes into a value that carries a gradient without autograd knowing "
                "(under torch.no_grad() or through .data or .detach())",
            )

    def _check_state(self, node: fx.Node, targets: tuple[fx.Node, ...]) -> None:
        """State keeps no graph from one step to the next, so what is written to it has no gradient."""
        for target in targets:
            home = self.homes[target]
            if self.trace[target].requires_grad and not self.trace[home.base].is_leaf:
                raise _refuse(
                    node,
                    f"it writes a value that carries a gradient into the model's state {home.base.target}",
                )


def _refuse(node: fx.Node, why: str) -> FxpartError:
    """FXP108 at the node's source line."""
    return error(
        "FXP108",
        where=place(node),
        why=f"{node.target}: {why}",
        fix="write the new value to a new tensor instead (y = x * 2, torch.where, torch.cat); "
        "for state, compute the new value under torch.no_grad()",
    )
