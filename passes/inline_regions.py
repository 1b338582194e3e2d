"""Inline regions under ``torch.no_grad`` and ``torch.autocast`` into the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.errors import error
from fxpart.pipeline.annotation import KEY, Level
from fxpart.pipeline.edit import add_call, annotation, fake_mode, place, value

_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


@dataclass(frozen=True)
class InlineRegions:
    """Replace region calls by their bodies.

    In a region without gradient, every outer value that could carry one is detached on the way in,
    so that the same ops record nothing. A region that switches autocast off, or on for a device
    that the graph does not use, is inlined as it is; one that casts is refused (FXP108).
    """

    name: ClassVar[str] = "inline_regions"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Inline until no region is left; nested regions too."""
        graph = graph_module.graph
        mode = fake_mode(graph)
        for node in list(graph.nodes):
            if _region(node):
                with graph.inserting_before(node):
                    _Inliner(graph_module, node, mode).inline()
        for node in reversed(graph.nodes):
            if node.op == "get_attr" and not node.users and _is_body(graph_module, node):
                graph.erase_node(node)
        graph_module.delete_all_unused_submodules()
        return graph_module


def _region(node: fx.Node) -> str:
    """The kind of region that a node calls, or "" """
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "higher_order":
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _is_body(root: torch.nn.Module, node: fx.Node) -> bool:
    """Whether a get_attr fetches the graph of a region."""
    return isinstance(attrgetter(str(node.target))(root), fx.GraphModule)


@dataclass
class _Inliner:
    """Inlines one region call of the outer graph, at its insertion point.

    detached: outer value -> its detached form, one for each value and region call.
    """

    root: fx.GraphModule
    call: fx.Node
    mode: AbstractContextManager[Any]
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def inline(self) -> None:
        """Replace the call and the getitems on it."""
        results = self.region(self.call, list(self.call.args), True, {})
        for user in list(self.call.users):
            index = user.args[1] if len(user.args) > 1 else None
            assert user.op == "call_function" and isinstance(index, int), (
                "a region's tuple is taken apart"
            )
            user.replace_all_uses_with(results[index])
            user.graph.erase_node(user)
        self.call.graph.erase_node(self.call)

    def region(
        self, call: fx.Node, args: Sequence[Any], grad: bool, inside: dict[fx.Node, bool]
    ) -> list[Any]:
        """The region's results as outer nodes.

        args: the call's arguments, nodes being outer ones except the body. grad: whether gradients
        are on around it. inside: outer nodes made under no_grad, which carry no gradient anyway.
        """
        kind = _region(call)
        if kind == _GRAD:
            enabled, body, *operands = args
            grad = bool(enabled)
        elif kind == _AUTOCAST:
            device, dtype, enabled, _, body, *operands = args
            if enabled and self._casts(str(device), operands):
                raise _refuse(
                    call, f"torch.autocast({device!r}, {dtype}) is on for a part of the model"
                )
        else:
            raise _refuse(call, f"the region {kind} cannot be cut into stages")
        path = str(body.target) if isinstance(body, fx.Node) else ""
        module = attrgetter(path)(self.root) if path else None
        if not isinstance(module, fx.GraphModule):
            raise _refuse(call, f"the region {kind} has no graph")
        return self.body(module, path, operands, grad, inside)

    def body(
        self,
        module: fx.GraphModule,
        path: str,
        operands: Sequence[Any],
        grad: bool,
        inside: dict[fx.Node, bool],
    ) -> list[Any]:
        """Copy a region's graph out; env maps its nodes to outer ones."""
        env: dict[fx.Node, Any] = {}
        inputs = iter(operands)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                env[node] = self._attribute(node, f"{path}.{node.target}")
            elif node.op == "output":
                found = fx.node.map_arg(node.args[0], env.__getitem__)
                return list(found) if isinstance(found, (tuple, list)) else [found]
            elif _region(node):
                args = fx.node.map_arg(node.args, env.__getitem__)
                env[node] = self.region(node, args, grad, inside)
            elif _region_item(node):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._copy(node, env, grad, inside)
        raise AssertionError("a region's graph has an output")

    def _copy(
        self, node: fx.Node, env: dict[fx.Node, Any], grad: bool, inside: dict[fx.Node, bool]
    ) -> fx.Node:
        """One op of the region; under no_grad its outer operands are detached."""

        def outer(source: fx.Node) -> Any:
            found = env[source]
            if grad or not isinstance(found, fx.Node) or found in inside:
                return found
            return self._detach(found)

        new = self.call.graph.node_copy(node, outer)
        if KEY not in new.meta:
            new.meta[KEY] = annotation(self.call)
        if not grad:
            inside[new] = True
        return new

    def _detach(self, outer: fx.Node) -> fx.Node:
        """The value without its gradient; itself where it can have none."""
        known = value(outer)
        if outer.op == "placeholder" or not isinstance(known, torch.Tensor):
            return outer
        if not (known.dtype.is_floating_point or known.dtype.is_complex):
            return outer
        if outer.op == "get_attr" and not attrgetter(str(outer.target))(self.root).requires_grad:
            return outer
        if outer not in self.detached:
            target = torch.ops.aten.detach.default
            self.detached[outer] = add_call(
                self.call.graph, target, (outer,), like=self.call, mode=self.mode
            )
        return self.detached[outer]

    def _attribute(self, node: fx.Node, path: str) -> fx.Node:
        """A constant or a nested region's graph that the region holds."""
        new = self.call.graph.get_attr(path)
        new.meta = dict(node.meta)
        return new

    def _casts(self, device: str, operands: Sequence[Any]) -> bool:
        """Whether autocast for the device type would do anything here."""
        used = {
            known.device.type
            for node in self.call.graph.nodes
            if isinstance(known := value(node), torch.Tensor)
        }
        return device in used


def _region_item(node: fx.Node) -> bool:
    """Whether a node takes one result out of a nested region."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and bool(_region(source))


def _refuse(call: fx.Node, why: str) -> Exception:
    """FXP108 at the first line of the region."""
    where = place(call)
    users: Iterator[fx.Node] = iter(call.users)
    first = next(users, None)
    if not annotation(call).source and first is not None:
        where = place(first)
    return error(
        "FXP108",
        where=where,
        why=why,
        fix="take it out of the model's forward and use it around the whole model instead, "
        "or cast the tensors there yourself with .to(dtype)",
    )
