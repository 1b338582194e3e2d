"""Convert torch.export's flat graph to a GraphModule with state under original names.

The exported graph takes parameters, buffers and constants as placeholders. Here each becomes a
``get_attr`` node, and only the user's tensors remain placeholders. ``ExportedProgram.module()`` is
not used because it adds guards and renames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fxpart.capture.data_dependent_sizes import refuse_data_sizes, refuse_transforms
from fxpart.capture.forward_gradients import expand_gradients
from fxpart.capture.model_tensors import ModelTensors
from fxpart.capture.selected_rows import keep_all_rows
from fxpart.capture.source_locations import annotate
from fxpart.compat import detach_constant, unflatten_output
from fxpart.compiler import LEVEL_KEY, Level
from fxpart.compiler.node_annotation import REORDERED_KEY, SKIPPED_KEY
from fxpart.errors import error


@dataclass(frozen=True)
class UnliftedGraph:
    """The graph, its placeholder names in input order, output names, constants and loss kind."""

    graph: fx.GraphModule
    placeholders: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    loss_kind: str


_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def original_name(name: str, loss_prefix: str) -> str:
    """Return the user's name for a name inside the ModelWithLoss module.

    See :class:`~fxpart.capture.model_with_loss.ModelWithLoss`.
    """
    first, _, rest = name.partition(".")
    if rest and first == "model":
        return rest
    if rest and first == "loss":
        return f"{loss_prefix}.{rest}"
    return name


def unlift(
    exported: ExportedProgram, names: Sequence[str], state: ModelTensors, loss_prefix: str
) -> UnliftedGraph:
    """Build the GraphModule of level CAPTURED; ``names`` are the wanted placeholder names."""
    source = exported.graph_module
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    specs = exported.graph_signature.input_specs
    nodes = [n for n in source.graph.nodes if n.op == "placeholder"]
    users = [n for n, s in zip(nodes, specs, strict=True) if s.kind is InputKind.USER_INPUT]
    for node, name in zip(users, names, strict=True):
        env[node] = graph.placeholder(name)
        env[node].meta = dict(node.meta)
    placeholders = tuple(env[node].name for node in users)
    for node, name in zip(users, placeholders, strict=True):
        env[node].target = name
    root: dict[str, torch.Tensor | torch.nn.Module] = {}
    constants: dict[str, torch.Tensor] = {}
    for node, spec in zip(nodes, specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            continue
        if spec.kind not in _STATE_KINDS:
            raise _unsupported(spec.kind.name, str(spec.target))
        name = state.main(original_name(str(spec.target), loss_prefix))
        if name not in state.tensors:
            name = name.replace("lifted_tensor_", "constant_")
            constants[name] = _constant(exported, str(spec.target))
        if not node.users:
            constants.pop(name, None)
            continue
        root[name] = constants.get(name, state.tensors.get(name))  # type: ignore[assignment]
        env[node] = graph.get_attr(name)
        env[node].meta = dict(node.meta)
        detach_constant(node.meta.get("val"))
    refuse_transforms(source.graph)
    reordered = keep_all_rows(source.graph)
    refuse_data_sizes(source.graph, recorded=False)
    outputs, kind = _copy_body(exported, graph, env, root)
    regions = [
        m
        for region in root.values()
        if isinstance(region, fx.GraphModule)
        for m in region.modules()
    ]
    expand_gradients(graph, [m for m in regions if isinstance(m, fx.GraphModule)])
    module = fx.GraphModule(root, graph, class_name="Captured")
    module.meta[LEVEL_KEY] = Level.CAPTURED
    module.meta[REORDERED_KEY] = reordered
    module.meta[SKIPPED_KEY] = source.meta.get(SKIPPED_KEY, ())
    annotate(module, loss_prefix)
    return UnliftedGraph(module, placeholders, outputs, constants, kind)


def _copy_body(
    exported: ExportedProgram,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    root: dict[str, torch.Tensor | torch.nn.Module],
) -> tuple[tuple[str, ...], str]:
    """Copy the ops and nested graphs, and write the output ``(loss, *outputs)``."""
    source = exported.graph_module
    for node in source.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            leaves = list(node.args[0])
            returned = unflatten_output(exported, leaves[len(leaves) - _user_outputs(exported) :])
            break
        if node.op == "get_attr":
            target = str(node.target)
            fresh = target
            while fresh in root or any(name.startswith(f"{fresh}.") for name in root):
                fresh += "_"
            root[fresh] = _with_code(getattr(source, target))
            env[node] = graph.get_attr(fresh)
            env[node].meta = dict(node.meta)
            continue
        env[node] = graph.node_copy(node, lambda n: env[n])
    return write_output(graph, {k: env[v] for k, v in returned.items()})


def _with_code(attribute: Any) -> Any:
    """Return a region's graph module with its code generated, which torch.export deferred."""
    if isinstance(attribute, torch.nn.Module):
        for module in attribute.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()
    return attribute


def write_output(graph: fx.Graph, returned: Mapping[str, fx.Node]) -> tuple[tuple[str, ...], str]:
    """Write the output ``(loss, *outputs)``; return the outputs' names and the kind of loss."""
    loss_key = next(key for key in returned if key.startswith("loss/"))
    outputs = tuple(key for key in returned if key != loss_key)
    values = (returned[loss_key], *(returned[key] for key in outputs))
    node = graph.output(values)
    node.meta["val"] = tuple(v.meta.get("val") for v in values)
    return outputs, loss_key.removeprefix("loss/")


def _user_outputs(exported: ExportedProgram) -> int:
    """Return the number of outputs of the user's forward (mutations come before them)."""
    return len(exported.graph_signature.user_outputs)


def _constant(exported: ExportedProgram, target: str) -> torch.Tensor:
    value = exported.constants[target]
    if not isinstance(value, torch.Tensor):
        raise _unsupported(type(value).__name__, target)
    return value.detach() if value.requires_grad else value


def _unsupported(kind: str, target: str) -> Exception:
    return error(
        "FXP108",
        where=target,
        why=f"the graph takes an input of kind {kind}, which is not a tensor",
        fix="keep custom objects and tokens out of forward, or move that part out of the model",
    )
