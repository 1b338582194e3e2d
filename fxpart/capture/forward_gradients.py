"""Gradients that forward computes with torch.autograd.grad, as operations of the graph.

A tracer sees none of the operations of a backward. So a trace keeps each call as one op, and
afterwards the operations of the backward between the call's inputs and outputs take its place. They
are differentiable as those of any forward: penalties of gradients, forces from an energy, residuals
of differential equations.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fxpart.capture.differentiable_calls import (
    call_differentiable,
    functional,
    is_new,
    separate_effects,
)
from fxpart.capture.source_locations import source_line
from fxpart.compat import python_dispatcher, record_operations
from fxpart.compiler.effects import is_op, list_written_nodes, view_chain
from fxpart.compiler.function_ops import find_function
from fxpart.compiler.graph_edit import fake_mode, value
from fxpart.errors import FxpartError, error

_LIBRARY = torch.library.Library("fxpart", "FRAGMENT")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] weights) -> Tensor[]")
_LIBRARY.impl(
    "gradient",
    lambda outputs, inputs, weights: [torch.empty_like(tensor) for tensor in inputs],
    "CompositeImplicitAutograd",
)
_CALL = torch.ops.fxpart.gradient.default
_DETACH = torch.ops.aten.detach.default
_ITEMS = (operator.getitem,)
_SHAPES = (torch.ops.aten.ones_like.default, torch.ops.aten.zeros_like.default)  # read no values
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)


class _GradientCalls(TorchFunctionMode):
    """Replaces calls of torch.autograd.grad by the op; raises FXP108 for other backwards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace one call; others run as they are."""
        if func in _BACKWARDS:
            raise _untraceable("backward() in forward", "it writes gradients into tensors")
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        return _record(*args, **(kwargs or {}))


def _record(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Record a call with the arguments of torch.autograd.grad."""
    if is_grads_batched:
        raise _untraceable("torch.autograd.grad(is_grads_batched=True)", "it is a vmap")
    of, over = _listed(outputs), _listed(inputs)
    given = [None] * len(of) if grad_outputs is None else _listed(grad_outputs)
    weights = [torch.ones_like(o) if w is None else w for o, w in zip(of, given, strict=True)]
    found = torch.ops.fxpart.gradient(of, over, weights)
    return tuple(found if create_graph else [each.detach() for each in found])


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def gradients_recorded() -> AbstractContextManager[Any]:
    """Keep each call of torch.autograd.grad in a trace, for :func:`expand_gradients`."""
    return _GradientCalls()


def expand_gradients(graph: fx.Graph, regions: Iterable[fx.GraphModule]) -> None:
    """Replace each recorded call by the operations of its backward.

    regions: the graphs of no-grad and autocast regions. Raise FXP108 for a call in one of them, for
    a backward that writes tensors in place or draws random numbers, and where an output does not
    depend on an input.
    """
    for node in list(graph.nodes):
        if node.target is _CALL:
            _Expansion(graph, node).run()
    for region in regions:
        refuse_gradients(region.graph, "it is inside of a torch.autocast or torch.no_grad region")


def refuse_gradients(graph: fx.Graph, why: str) -> None:
    """Raise FXP108 for a recorded call."""
    for node in graph.nodes:
        if node.target is _CALL:
            raise _refused(node, why)


class _Expansion:
    """One recorded call, and the nodes between its inputs and outputs."""

    def __init__(self, graph: fx.Graph, call: fx.Node) -> None:
        """Find the nodes between."""
        self.graph, self.call = graph, call
        self.outputs, self.inputs, self.weights = (list(group) for group in call.args)  # type: ignore[arg-type]
        dependent: set[fx.Node] = set()  # on an input
        for node in graph.nodes:
            if node is call:
                break
            if node.target not in _SHAPES and any(
                s in dependent or s in self.inputs for s in node.all_input_nodes
            ):
                dependent.add(node)
        self.starts = [node for node in self.inputs if node not in dependent]
        needed, todo = set[fx.Node](), [*self.outputs, *self.inputs]
        while todo:
            node = todo.pop()
            if node in dependent and node not in needed:
                needed.add(node)
                todo += node.all_input_nodes
        self.between = [node for node in graph.nodes if node in needed]
        used = {source for node in self.between for source in node.all_input_nodes}
        others = {*used, *self.outputs, *self.weights} - needed - {*self.starts}
        self.given = [node for node in graph.nodes if node in others]

    def run(self) -> None:
        """Insert the backward before the call, and remove the call."""
        separated = [separate_effects(node) for node in self.between]
        if any(separated):
            return _Expansion(self.graph, self.call).run()
        for node in self.between:
            if not is_op(node.target) and node.target not in _ITEMS:
                raise self._refused(f"{node.name} calls no single operation")
            if find_function(node.target):
                raise self._refused("a torch.autograd.Function has a backward of its own")
            if is_op(node.target) and node.target._schema.is_mutable:
                raise self._refused(f"{node.target} writes a view or a tensor with views in place")
        mode = fake_mode(self.graph)
        values = [value(node) for node in (*self.starts, *self.given)]
        try:
            with mode, python_dispatcher(mode), sdpa_kernel(SDPBackend.MATH):
                traced = record_operations(self._differentiate, *values, below_autograd=True)
        except FxpartError:
            raise
        except Exception as cause:  # a backward may raise anything
            raise self._refused(str(cause).partition("\n")[0]) from cause
        gradients = self._insert(traced)
        for user in list(self.call.users):
            user.replace_all_uses_with(gradients[user.args[1]])  # type: ignore[index]
            self.graph.erase_node(user)
        self.graph.erase_node(self.call)

    def _differentiate(self, *values: torch.Tensor) -> tuple[list[Any], list[Any]]:
        """Return the gradients, and the values of the nodes between."""
        with torch.enable_grad():
            count = len(self.starts)
            known: dict[fx.Node, Any] = dict(zip(self.given, values[count:], strict=True))
            starts = [tensor.detach().requires_grad_() for tensor in values[:count]]
            known |= dict(zip(self.starts, starts, strict=True))
            for node in self.between:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = call_differentiable(node.target, args, dict(kwargs))
            found = torch.autograd.grad(
                [known[node] for node in self.outputs],
                [known[node] for node in self.inputs],
                [known[node] for node in self.weights],
                create_graph=True,  # with formulas that have derivatives themselves
                allow_unused=True,
            )
        if any(gradient is None for gradient in found):
            raise self._refused("an output does not depend on one of the inputs")
        return list(found), [known[node] for node in self.between]

    def _insert(self, traced: fx.GraphModule) -> list[fx.Node]:
        """Copy what the gradients need; values of the nodes between exist already."""
        returned: Any = traced.graph.output_node().args[0]
        gradients, between = returned
        env = dict(
            zip(traced.graph.find_nodes(op="placeholder"), (*self.starts, *self.given), strict=True)
        )
        env |= {
            made: node
            for made, node in zip(between, self.between, strict=True)
            if isinstance(made, fx.Node)
        }
        wanted = self._find_wanted(traced.graph, gradients, env)
        with self.graph.inserting_before(self.call):
            for node in traced.graph.nodes:
                if node in wanted:
                    env[node] = self._copy(node, env, traced)
        return [env[node] for node in gradients]

    def _find_wanted(
        self, traced: fx.Graph, gradients: list[Any], env: dict[fx.Node, fx.Node]
    ) -> set[fx.Node]:
        """Return the nodes that compute the gradients, with the writes into their memory.

        Raise FXP108 for a write into a value that exists already.
        """
        place = {node: i for i, node in enumerate(traced.nodes)}
        owner = {node: [*view_chain(node)][-1] for node in traced.nodes}
        exists = {owner[node]: place[node] for node in env}
        writers: dict[fx.Node, list[fx.Node]] = {}
        for node in traced.nodes:
            for into in list_written_nodes(node):
                writers.setdefault(owner[into], []).append(node)
                if place[node] > exists.get(owner[into], len(place)):
                    raise self._refused(f"its backward calls {node.target}, which writes in place")
        wanted, todo = set[fx.Node](), [node for node in gradients if isinstance(node, fx.Node)]
        while todo:
            node = todo.pop()
            if node not in wanted and node not in env:
                wanted.add(node)
                todo += [*node.all_input_nodes, *writers.get(owner[node], ())]
        return wanted

    def _copy(self, node: fx.Node, env: dict[fx.Node, fx.Node], traced: fx.GraphModule) -> fx.Node:
        if node.target is _DETACH:  # of a saved tensor, whose own derivative counts
            return env[node.args[0]]  # type: ignore[index]
        if node.op != "call_function":
            raise self._refused("its backward uses a tensor from outside")
        if is_op(node.target):
            if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
                raise self._refused("its backward draws random numbers")
        made = self.graph.node_copy(node, env.__getitem__)
        into = node.args[0] if node.args else None
        if isinstance(into, fx.Node) and is_new(into) and len(into.users) == 1:
            made.target = functional(node.target)
        args, kwargs = fx.node.map_arg((made.args, dict(made.kwargs)), value)
        with fake_mode(self.graph) as mode, python_dispatcher(mode), torch.no_grad():
            known = made.target(*args, **kwargs)  # type: ignore[operator]
        made.meta = {**self.call.meta, "val": known}
        return made

    def _refused(self, why: str) -> FxpartError:
        return _refused(self.call, why)


def _refused(call: fx.Node, why: str) -> FxpartError:
    return _untraceable(source_line(call.meta.get("stack_trace")) or call.name, why)


def _untraceable(where: str, why: str) -> FxpartError:
    return error(
        "FXP108",
        where=where,
        why=f"the gradient that forward computes cannot be traced: {why}",
        fix="use torch.autograd.grad(..., create_graph=True) or differentiable torch operations",
    )
