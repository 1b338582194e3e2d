"""Fallback trace method: torch.fx symbolic tracing, then recording the ops with their shapes.

torch.fx runs the module on proxies and needs no fake kernels, but records Python calls. These are
replayed on real tensors and recorded as torch operations with shapes, so that passes see the same
kind of graph from every method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from fxpart.capture.context_managers import preserve_buffers
from fxpart.capture.data_dependent_sizes import refuse_data_sizes
from fxpart.capture.model_tensors import ModelTensors
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.source_locations import annotate
from fxpart.capture.unlift import UnliftedGraph, original_name, write_output
from fxpart.compat import record_operations
from fxpart.compiler import LEVEL_KEY, Level


class _StatelessInterpreter(fx.Interpreter):
    """Runs the traced graph with external parameters and buffers, by full name."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self.values = values

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the given tensor of this name."""
        return self.values[str(target)]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a leaf module (of torch.nn) with the given tensors under its name."""
        module = self.fetch_attr(str(target))
        given = {name: self.values[f"{target}.{name}"] for name, _ in _tensors(module)}
        return torch.func.functional_call(module, given, args, kwargs)


@dataclass(frozen=True)
class TracedGraph:
    """A recorded graph with placeholders for ``names`` (state, original names) and the inputs."""

    graph: fx.Graph
    names: tuple[str, ...]
    returned: tuple[str, ...]
    values: dict[str, torch.Tensor]


def symbolic_trace(whole: ModelWithLoss, tensors: Sequence[torch.Tensor]) -> TracedGraph:
    """Trace and record a module with data at the size of ``tensors``; raise torch's errors."""
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    tracer.proxy_buffer_attributes = True
    drawn = torch.random.get_rng_state()
    graph = tracer.trace(whole)
    if not torch.equal(drawn, torch.random.get_rng_state()):
        # Code that does not depend on an input runs during tracing and would become a constant.
        raise RuntimeError("torch.fx would record random numbers without an input as constants")
    module = fx.GraphModule(whole, graph)
    values = _used(whole, graph)
    returned: list[str] = []

    def replay(state: list[torch.Tensor], batch: list[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(values, state, strict=True))
        with fx_traceback.preserve_node_meta():
            result = _StatelessInterpreter(module, given).run(tuple(batch))
        returned[:] = result
        return list(result.values())

    with preserve_buffers(whole), torch.random.fork_rng():
        copies = [v if isinstance(v, nn.Parameter) else v.clone() for v in values.values()]
        recorded = record_operations(replay, copies, [t.clone() for t in tensors])
    refuse_data_sizes(recorded.graph, recorded=True)
    return TracedGraph(recorded.graph, tuple(values), tuple(returned), values)


def name_state(
    traced: TracedGraph, names: Sequence[str], state: ModelTensors, loss_prefix: str
) -> UnliftedGraph:
    """Return the recorded graph with state under original names, like :func:`~.unlift.unlift`."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    nodes = [n for n in traced.graph.nodes if n.op == "placeholder"]
    count = len(traced.names)
    for node, name in zip(nodes[count:], names, strict=True):
        env[node] = graph.placeholder(name)
        env[node].target = env[node].name
        env[node].meta = dict(node.meta)
    placeholders = tuple(env[node].name for node in nodes[count:])
    root: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    for node, target in zip(nodes[:count], traced.names, strict=True):
        name = state.main(original_name(target, loss_prefix))
        if name not in state.tensors:
            constants[name] = traced.values[target]
        root[name] = constants.get(name, state.tensors.get(name, traced.values[target]))
        env[node] = graph.get_attr(name)
        env[node].meta = dict(node.meta)
        if root[name].requires_grad:
            env[node].meta["val"].requires_grad_(True)
    returned: dict[str, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            returned = dict(zip(traced.returned, (env[n] for n in node.args[0]), strict=True))
        elif node.op == "get_attr":
            name = f"constant_{len(constants)}"
            constants[name] = root[name] = getattr(traced.graph.owning_module, str(node.target))
            env[node] = graph.get_attr(name)
            env[node].meta = dict(node.meta)
        elif node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    outputs, kind = write_output(graph, returned)
    module = fx.GraphModule(root, graph, class_name="Captured")
    module.meta[LEVEL_KEY] = Level.CAPTURED
    annotate(module, loss_prefix)
    return UnliftedGraph(module, placeholders, outputs, constants, kind)


def _used(whole: nn.Module, graph: fx.Graph) -> dict[str, torch.Tensor]:
    """Return the tensors that a traced graph reads, directly or in a leaf module, by full name."""
    values: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value: Any = whole
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, nn.Module):
            values |= {f"{node.target}.{name}": tensor for name, tensor in _tensors(value)}
        else:
            assert isinstance(value, torch.Tensor), "get_attr of a traced graph is a tensor"
            values[str(node.target)] = value
    return values


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
