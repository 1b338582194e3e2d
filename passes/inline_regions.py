"""Inline regions under ``torch.no_grad`` and ``torch.autocast`` into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import fx

from fxpart.compat import disable_guards, python_dispatcher
from fxpart.compiler.autocast_region import (
    DEVICES_KEY,
    WHOLE_KEY,
    AutocastRegion,
    conversions,
)
from fxpart.compiler.effects import is_op, list_written_nodes, packet_name
from fxpart.compiler.functional_ops import METADATA_OPS
from fxpart.compiler.graph_edit import add_call, annotation, fake_mode, value
from fxpart.compiler.higher_order_ops import (
    AUTOCAST,
    GRAD,
    refused_region,
    region_name,
    region_place,
)
from fxpart.compiler.node_annotation import KEY, Level
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import error

Converted = dict[tuple[fx.Node, torch.dtype], fx.Node]


@dataclass(frozen=True)
class InlineRegionsPass:
    """Replace region calls by their bodies.

    In a no-grad region, outer values that may require a gradient are detached on entry, so the same
    ops record nothing. In an autocast region, its dtype conversions become explicit ops; those of a
    parameter are shared within the region, like in the autocast cache. A composite op that converts
    internally is rejected (FXP108). module_device: whether to convert as on the device of the
    captured module instead of the device type that the ranks have.
    """

    module_device: bool = False

    name: ClassVar[str] = "inline_regions"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Inline all regions, including nested ones."""
        graph = graph_module.graph
        mode = fake_mode(graph)
        shared: Converted = {}
        whole = bool(graph_module.meta.get(WHOLE_KEY))
        own, target = graph_module.meta.get(DEVICES_KEY, ("", ""))
        devices = {own: own if self.module_device else target}
        changed: set[fx.Node] = set()
        for node in list(graph.nodes):
            if region_name(node):
                with graph.inserting_before(node):
                    _Inliner(
                        graph_module, node, mode, shared if whole else {}, devices, changed
                    ).inline()
            elif changed:
                _recompute_value(node, changed, mode)
        for node in reversed(graph.nodes):
            if node.op == "get_attr" and not node.users and _is_body(graph_module, node):
                graph.erase_node(node)
        graph_module.delete_all_unused_submodules()
        return graph_module


def _recompute_value(
    node: fx.Node, changed: set[fx.Node], mode: AbstractContextManager[Any], always: bool = False
) -> None:
    """Compute the value of a node again if an operand's dtype has changed; record other dtypes."""
    if node.op != "call_function" or not (always or changed.intersection(node.all_input_nodes)):
        return
    before, target = [t.dtype for t in tensors(value(node))], node.target
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    assert callable(target), "an op is a callable"
    with mode, disable_guards(mode), python_dispatcher(mode), torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    if [t.dtype for t in tensors(value(node))] != before:
        changed.add(node)


def _is_body(root: torch.nn.Module, node: fx.Node) -> bool:
    """Return whether a get_attr fetches the graph of a region."""
    return isinstance(attrgetter(str(node.target))(root), fx.GraphModule)


@dataclass(frozen=True)
class _RegionContext:
    """Modes inside a region: gradients on or off, and autocast."""

    grad: bool = True
    autocast: AutocastRegion | None = None


@dataclass
class _Inliner:
    """Inlines one region call of the outer graph, at its insertion point.

    converted: (parameter, dtype) -> its shared conversion; the autocast cache, valid until the
    outermost region ends. devices: device type at capture -> device type that runs it. changed:
    nodes whose dtypes are not those recorded at capture, because autocast of the other device
    differs. detached: outer value -> its detached form. ungraded: outer nodes created without
    gradient, which need no detach.
    """

    root: fx.GraphModule
    call: fx.Node
    mode: AbstractContextManager[Any]
    converted: Converted
    devices: dict[str, str] = field(default_factory=dict)
    changed: set[fx.Node] = field(default_factory=set)
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)
    ungraded: set[fx.Node] = field(default_factory=set)

    def inline(self) -> None:
        """Replace the call and the getitems on it."""
        results = self._region(self.call, self.call.args, _RegionContext())
        for user in list(self.call.users):
            index = user.args[1] if len(user.args) > 1 else None
            assert isinstance(index, int), "a region's results are taken one by one"
            user.replace_all_uses_with(results[index])
            user.graph.erase_node(user)
        self.call.graph.erase_node(self.call)

    def _region(self, call: fx.Node, args: Sequence[Any], around: _RegionContext) -> list[Any]:
        """Return the region's results as outer nodes; args: the call's arguments as outer nodes."""
        kind = region_name(call)
        if kind == GRAD:
            enabled, body, *operands = args
            around = replace(around, grad=bool(enabled))
        elif kind == AUTOCAST:
            device, dtype, enabled, cache, body, *operands = args
            around = replace(around, autocast=self._autocast(device, dtype, enabled, cache))
        else:
            raise refused_region(call)
        path = str(body.target) if isinstance(body, fx.Node) else ""
        module = attrgetter(path)(self.root) if path else None
        if not isinstance(module, fx.GraphModule):
            raise _refuse(call, f"the region {kind} has no graph")
        return self._body(module, path, operands, around)

    def _autocast(self, device: Any, dtype: Any, enabled: Any, cache: Any) -> AutocastRegion | None:
        """Return the region's autocast; None if it is disabled."""
        if not enabled:
            return None
        chosen = torch.get_autocast_dtype(str(device)) if dtype is None else dtype
        kind = self.devices.get(str(device), str(device))
        return AutocastRegion(kind, chosen, cache is None or bool(cache))

    def _body(
        self, module: fx.GraphModule, path: str, operands: Sequence[Any], around: _RegionContext
    ) -> list[Any]:
        """Copy a region's graph into the outer graph; env maps its nodes to outer nodes."""
        env: dict[fx.Node, Any] = {}
        inputs = iter(operands)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                env[node] = self._attribute(node, f"{path}.{node.target}")
            elif node.op == "output":
                found = fx.node.map_arg(node.args[0], lambda n: env[_written_object(n)])
                return list(found) if isinstance(found, (tuple, list)) else [found]
            elif region_name(node):
                args = fx.node.map_arg(node.args, env.__getitem__)
                env[node] = self._region(node, args, around)
            elif _region_item(node):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._copy(node, env, around)
        raise AssertionError("a region's graph has an output")

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any], around: _RegionContext) -> fx.Node:
        """Copy one op of the region, with detached and converted operands as required."""

        def outer(source: fx.Node) -> Any:
            found = env[source]
            if around.grad or not isinstance(found, fx.Node) or found in self.ungraded:
                return found
            return self._detach(found)

        new = self.call.graph.node_copy(node, outer)
        if KEY not in new.meta:
            new.meta[KEY] = annotation(self.call)
        region = around.autocast
        if region is not None and is_op(new.target):
            self._convert(new, region)
        other = region is not None and region.device not in self.devices
        if other or self.changed:
            _recompute_value(new, self.changed, self.mode, always=other)
        if not around.grad:
            self.ungraded.add(new)
        return new

    def _convert(self, node: fx.Node, region: AutocastRegion) -> None:
        """Add explicit conversions of the node's operands under autocast."""
        given = fx.node.map_arg((node.args, dict(node.kwargs)), value)
        assert callable(node.target), "an op is a callable"
        found = conversions(region, node.target, *given, self.mode)
        if found is None:
            raise _refuse(
                node,
                f"torch.autocast({region.device!r}, {region.dtype}) converts inside {node.target}",
            )

        def convert(source: fx.Node) -> fx.Node:
            dtype = found.get(id(value(source)))
            return source if dtype is None else self._converted(source, dtype, node, region.cache)

        with node.graph.inserting_before(node):
            node.args, node.kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), convert)

    def _converted(
        self, source: fx.Node, dtype: torch.dtype, like: fx.Node, cache: bool
    ) -> fx.Node:
        """Return the value in another dtype; a trained parameter is converted once per region."""
        shared = cache and source.op == "get_attr" and self._trained(source)
        if shared and (source, dtype) in self.converted:
            return self.converted[source, dtype]
        to = torch.ops.aten.to.dtype
        new = add_call(self.call.graph, to, (source, dtype), like=like, mode=self.mode)
        if shared:
            self.converted[source, dtype] = new
        return new

    def _trained(self, node: fx.Node) -> bool:
        """Return whether a get_attr fetches state that requires a gradient."""
        return bool(getattr(attrgetter(str(node.target))(self.root), "requires_grad", False))

    def _detach(self, outer: fx.Node) -> fx.Node:
        """Return the value without its gradient; unchanged if it cannot have one."""
        known = value(outer)
        if outer.op == "placeholder" or not isinstance(known, torch.Tensor):
            return outer
        if not (known.dtype.is_floating_point or known.dtype.is_complex):
            return outer
        if outer.op == "get_attr" and not self._trained(outer):
            return outer
        if outer not in self.detached:
            target = torch.ops.aten.detach.default
            self.detached[outer] = add_call(
                self.call.graph, target, (outer,), like=self.call, mode=self.mode
            )
        return self.detached[outer]

    def _attribute(self, node: fx.Node, path: str) -> fx.Node:
        """Copy a constant or the graph of a nested region."""
        new = self.call.graph.get_attr(path)
        new.meta = dict(node.meta)
        return new


def _written_object(node: fx.Node) -> fx.Node:
    """Return the node whose tensor object a chain of in-place ops returned.

    Outside the region it is the same tensor as before, including its gradient.
    """
    while is_op(node.target) and packet_name(node.target) not in METADATA_OPS:
        targets = list_written_nodes(node)
        if len(targets) != 1 or node.args[:1] != targets or "out" in node.kwargs:
            break
        node = targets[0]
    return node


def _region_item(node: fx.Node) -> bool:
    """Return whether a node takes one result of a nested region."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and bool(region_name(source))


def _refuse(call: fx.Node, why: str) -> Exception:
    """Return FXP108 at the first line of the region."""
    return error(
        "FXP108",
        where=region_place(call),
        why=why,
        fix="put the op under torch.autocast(device, enabled=False), or convert its operands "
        "explicitly with .to(dtype)",
    )
