"""Build the rank-local graph op by op: reshard operands, localize arguments, compute values."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpart.compiler.graph_edit import annotate, annotation, describe_node, value
from fxpart.compiler.node_annotation import BLOCKS_KEY, KEY, NodeAnnotation, NodeSharding
from fxpart.compiler.size_symbols import readable
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.errors import error
from fxpart.sharding import REPLICATE, Placements

from .local_calls import LocalCall, call_of
from .local_module import local_module
from .local_sizes import LocalSizes, Size, SizeNodes, factors
from .local_values import FakeCallRunner, map_tensors, same
from .placement_requirements import (
    PlacementRequirement,
    PlacementRequirements,
    is_free_size,
    is_item,
)
from .random_draw_order import reorder_random_call
from .reshard_builder import ReshardBuilder

_VIEW = torch.ops.aten.view.default


class LocalGraphBuilder:
    """Builds the rank-local graph of a sharded graph."""

    def __init__(
        self, module: fx.GraphModule, demands: PlacementRequirements, mesh_rank: int
    ) -> None:
        """demands: of the module's graph. mesh_rank: the mesh rank (for uneven sharding)."""
        self.module, self.demands, self.mesh_rank = module, demands, mesh_rank
        mesh = demands.mesh
        inputs: dict[fx.Node, Placements] = {
            n: demands.home(n)
            for n in module.graph.find_nodes(op="placeholder")
            if isinstance(value(n), torch.Tensor)
        }
        symbols = readable((node, value(node)) for node in inputs)
        self.local = LocalSizes(mesh, mesh_rank, factors(inputs, mesh), symbols)
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.block: int | None = None  # of the op being added
        self.like: fx.Node | None = None
        self.run = FakeCallRunner(module.graph, mesh, mesh_rank)
        made = [self._input(n) for n in module.graph.find_nodes(op="placeholder")]
        self.sizes = SizeNodes(self.graph, [n for n in made if isinstance(value(n), torch.Tensor)])
        self.moves = ReshardBuilder(demands, self.local, self.sizes.node, self._add)

    def build(self) -> fx.GraphModule:
        """Return the local module; state is on the meta device."""
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self._state(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        return local_module(self.module, self.graph, self.demands, self.mesh_rank)

    # inputs and state

    def _input(self, node: fx.Node) -> fx.Node:
        """Add a local placeholder of the same name."""
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        held = value(node)
        if isinstance(held, torch.Tensor):
            new.meta["val"] = self._like(held, self.demands.home(node))
            self._lies(node, new)
        self.env[node] = new
        return new

    def _state(self, node: fx.Node) -> None:
        """Add a local get_attr; its value is this rank's shard."""
        new = self.graph.create_node("get_attr", node.target, (), {}, node.name)
        new.meta = dict(node.meta)
        new.meta["val"] = self._like(value(node), self.demands.home(node))
        self._lies(node, new)
        self.env[node] = new

    def _lies(self, node: fx.Node, new: fx.Node) -> None:
        """Set the placements of an input or state; undecided axes are replicated."""
        plain = ("",) * len(self.demands.mesh.axes)
        known = annotation(node).sharding or NodeSharding(plain, ())
        annotate(new, sharding=replace(known, results=self.demands.homes[node]))

    def _like(self, held: torch.Tensor, home: Placements) -> torch.Tensor:
        """Return a fake tensor of the local shape; the same tensor if the shape is the same."""
        whole = [self.local.whole(s) for s in held.shape]
        shape = self.local.shape(whole, home)
        if shape == [expression(s) for s in held.shape]:
            return self.run.alike(held)
        return self.run.alike(self.run.empty([self.run.symint(s) for s in shape], held))

    # ops

    def _call(self, node: fx.Node) -> None:
        """Add the local form of one node."""
        if is_item(node):
            self.env[node] = self._taken(node)
            return
        if is_free_size(node) and self.sizes.known(self.local.whole(value(node))):
            return  # computed where it is used
        self.block, self.like = annotation(node).block, node
        call, back = reorder_random_call(node, self._local_call(node), self._add)
        new = self.graph.create_node(
            "call_function", call.target, call.args, call.kwargs, node.name, node.type
        )
        new.meta = dict(node.meta)
        new.meta["val"] = self._value_or_copy(node, new)
        if back is not None:
            new = self._add(torch.ops.aten.permute.default, (new, back))
        self.env[node] = new
        if node in self.demands.given:  # not a size computation
            self._check(node, new)
            self._pin(node, new)

    def _local_call(self, node: fx.Node) -> LocalCall:
        """Return target and arguments for local operands; sizes not sharded are global."""
        operands = iter(self.demands.requirements.get(node, ()))

        def made_local(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return self._argument(item, node, operands)
            if isinstance(item, (list, tuple)):
                return type(item)(made_local(i) for i in item)
            if isinstance(item, torch.SymInt):
                return self.sizes.value(self.local.whole(item))
            return item

        args = tuple(made_local(a) for a in node.args)
        kwargs = {k: made_local(v) for k, v in node.kwargs.items()}
        made = call_of(node, (args, kwargs), self.demands, self._shapes(node), self._whole_value)
        return LocalCall(made.target, *self._settle((made.args, made.kwargs)))

    def _argument(
        self, item: fx.Node, user: fx.Node, operands: Iterator[PlacementRequirement]
    ) -> Any:
        """Return a node argument: a tensor resharded as the op requires, or a size."""
        held = value(item)
        if isinstance(held, torch.Tensor):
            return self._moved(next(operands))
        if item in self.env:
            if tensors(held) and any(p != REPLICATE for h in self.demands.homes[item] for p in h):
                why = f"it takes the whole tuple {item.name}, which is sharded"
                raise error("FXP900", where=describe_node(user), why=why)
            return self.env[item]
        return self.sizes.value(self.local.whole(held))

    def _moved(self, demand: PlacementRequirement) -> fx.Node:
        """Return an operand in the placements that its user requires."""
        held = self.env[demand.source]
        return self.moves.operand(demand, held, self._whole_shape(demand.source), self.block)

    def _settle(self, arguments: Any) -> Any:
        """Replace symbolic sizes among arguments by nodes."""
        return fx.node.map_aggregate(
            arguments,
            lambda a: self.sizes.node(expression(a)) if isinstance(a, torch.SymInt) else a,
        )

    def _whole_value(self, size: Any) -> Any:
        """Return a global size as a number or SymInt of the local graph."""
        return self.sizes.value(self.local.whole(size))

    def _whole_shape(self, node: fx.Node) -> list[Size]:
        return [self.local.whole(s) for s in value(node).shape]

    def _shapes(self, node: fx.Node) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Return the local shapes of operands and of the op's results."""
        requirements = self.demands.requirements.get(node, ())
        inside = [
            self._numbers(self.local.shape(self._whole_shape(d.source), d.target))
            for d in requirements
        ]
        outside = [
            self._numbers(self.local.shape([self.local.whole(s) for s in t.shape], p))
            for t, p in zip(tensors(value(node)), self.demands.given.get(node, ()), strict=True)
        ]
        return inside, outside

    def _numbers(self, shape: Sequence[Size]) -> tuple[Any, ...]:
        return tuple(self.sizes.value(s) if self.sizes.known(s) else s for s in shape)

    # values

    def _value(self, node: fx.Node, new: fx.Node) -> Any:
        """Return the local value: computed, or like the global value for data-dependent sizes."""
        held = value(node)
        if self.run.decided_by_data(node):
            homes = iter(self.demands.given[node])
            return map_tensors(held, lambda t: self._like(t, next(homes)))
        return self.run.value(new, held)

    def _value_or_copy(self, node: fx.Node, new: fx.Node) -> Any:
        """Return the local value; a view that local strides do not allow becomes a copy."""
        try:
            return self._value(node, new)
        except (ValueError, RuntimeError):
            if new.target is not _VIEW:
                raise
            new.target = torch.ops.aten.reshape.default
            return self._value(node, new)

    def _check(self, node: fx.Node, new: fx.Node) -> None:
        """Check that the op returns the local shapes of its layout."""
        for t, whole, home in zip(
            tensors(value(new)), tensors(value(node)), self.demands.given[node], strict=True
        ):
            wanted = self.local.shape([self.local.whole(s) for s in whole.shape], home)
            if not all(same(a, b) for a, b in zip(t.shape, wanted, strict=True)):
                why = f"its local shape is {list(t.shape)}, but its layout requires {wanted}"
                raise error("FXP900", where=describe_node(node), why=why)

    def _pin(self, node: fx.Node, new: fx.Node) -> None:
        """Reshard results to annotated placements."""
        given, homes = self.demands.given[node], self.demands.homes[node]
        if given == homes:
            return
        if isinstance(value(new), torch.Tensor):
            shape = self._whole_shape(node)
            self.env[node] = self.moves.pinned(given[0], homes[0], new, shape)

    def _taken(self, node: fx.Node) -> fx.Node:
        """Return one item of a tuple, in its annotated placements."""
        source: Any
        index: Any
        source, index = node.args
        self.block, self.like = annotation(node).block, node
        new = self.graph.create_node(
            "call_function", operator.getitem, (self.env[source], index), {}, node.name
        )
        new.meta = dict(node.meta)
        new.meta["val"] = value(self.env[source])[index]
        given, homes = self.demands.given[node], self.demands.homes[node]
        if given != homes and isinstance(value(node), torch.Tensor):
            return self.moves.pinned(given[0], homes[0], new, self._whole_shape(node))
        return new

    def _add(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Add a collective for the current op."""
        assert self.like is not None, "a collective serves an op"
        new = self.graph.call_function(target, args, kwargs or {})
        origin = annotation(self.like)
        new.meta = {k: v for k, v in self.like.meta.items() if k in ("nn_module_stack",)}
        new.meta[KEY] = NodeAnnotation(
            module=origin.module, source=origin.source, block=self.block, stage=origin.stage
        )
        new.meta["val"] = self.run.value(new)
        return new

    def _output(self, node: fx.Node) -> None:
        """Add the output; its reshards belong to the last block."""
        last = len(self.module.meta[BLOCKS_KEY]) - 1
        operands = iter(self.demands.requirements[node])
        self.like = next(
            n for n in reversed(self.module.graph.nodes) if annotation(n).block == last
        )
        self.block = last
        returned: Any = node.args[0]
        held = tuple(
            self._argument(r, node, operands) if isinstance(r, fx.Node) else r for r in returned
        )
        new = self.graph.output(self._settle(held))
        new.meta = dict(node.meta)
