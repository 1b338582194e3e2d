"""Evaluation-mode stages that return sums over the outputs of all modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxpart.codegen.dataflow import is_op
from fxpart.compiler import PassManager
from fxpart.compiler.graph_edit import add_call, annotation, fake_mode
from fxpart.errors import error
from fxpart.passes import all_passes
from fxpart.runtime.batch.outputs import Outputs, OutputSpec
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.state.module_constants import ModuleConstants
from fxpart.training.evaluation import place_on_training_stages

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture import CapturedModel

ATEN = torch.ops.aten
_INLINE = "drop_asserts,inline_regions"
_PASS_ON = frozenset(
    {
        ATEN.to.dtype, ATEN.to.dtype_layout, ATEN.to.device, ATEN.to.other, ATEN._to_copy.default,
        ATEN.alias.default, ATEN.detach.default, ATEN.contiguous.default,
    }
)  # fmt: skip


def build_activation_stages(
    program: Program, mesh_ranks: Sequence[MeshRank], constants: ModuleConstants | None = None
) -> tuple[list[MeshRank], Outputs]:
    """Build stages that return, for each module output, sums over the elements of each row.

    The rows are those of :func:`~fxpart.runtime.monitor.tensor_statistics.sum_elements`. The sums
    are part of the graph, so whole activations are not gathered. An output is named after its
    module; several of one module are ``module.0``, ``module.1``. FXP109 for a model that was
    captured at one batch size, where the dim of the rows is not known.
    """
    assert program.captured.again is not None
    captured = program.captured.again(False)
    if not captured.symbolic:
        raise error(
            "FXP109", where="activation statistics",
            why="the model was captured at one batch size, so the rows of its activations are not "
            "known", fix="log statistics of gradients only",
        )  # fmt: skip
    # Modules are inside the regions of autocast, which are inlined first.
    inlined = PassManager(all_passes()).run(_INLINE, captured.graph)
    captured = replace(captured, graph=inlined)
    graph = captured.graph.graph
    (output,) = graph.find_nodes(op="output")
    symbols = _find_batch_symbols(captured)
    sums: dict[fx.Node, fx.Node] = {}
    specs: list[tuple[str, int | None, fx.Node]] = []
    for name, value in find_module_outputs(graph, _find_containers(captured)):
        dim = _find_row_dim(value, symbols)
        if value not in sums:
            with graph.inserting_before(output):
                sums[value] = _add_sums(graph, value, dim)
        specs.append((name, None if dim is None else 0, sums[value]))
    output.args = ((None, *sums.values()),)
    captured.graph.recompile()
    found = place_on_training_stages(program, captured, mesh_ranks, constants, keep_outputs=True)
    values = dict(zip(sums.values(), found[0].spec.outputs, strict=True))
    return found, Outputs(tuple(OutputSpec(values[node], name, dim) for name, dim, node in specs))


def find_module_outputs(
    graph: fx.Graph, containers: Collection[str] = ()
) -> list[tuple[str, fx.Node]]:
    """Return the floating-point values that are computed in a module and read outside of it.

    By the module's path, in the order of the graph. containers: paths of modules that are not
    called, such as ModuleList.
    """
    found: dict[str, dict[fx.Node, None]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not is_op(node) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        origin, path = _find_origin(node), annotation(node).module
        while path:
            read = any(not _is_inside(user, path) for user in node.users)
            if read and path not in containers and _is_inside(origin, path):
                found.setdefault(path, {})[origin] = None
            path = path.rpartition(".")[0]
    return [
        (path if len(nodes) == 1 else f"{path}.{index}", node)
        for path, nodes in found.items()
        for index, node in enumerate(nodes)
    ]


def _find_origin(node: fx.Node) -> fx.Node:
    """Return the node that computes the value, where casts to the same dtype only pass it on."""
    while node.target in _PASS_ON and isinstance(node.args[0], fx.Node):
        source = node.args[0].meta.get("val")
        if not isinstance(source, torch.Tensor) or source.dtype != node.meta["val"].dtype:
            break
        node = node.args[0]
    return node


def _is_inside(node: fx.Node, path: str) -> bool:
    """Return whether an op is computed in the module; inputs, state and output are not."""
    return is_op(node) and f"{annotation(node).module}.".startswith(f"{path}.")


def _find_containers(captured: CapturedModel) -> set[str]:
    """Return the paths of the modules that only hold others."""
    module = None if captured.source is None else captured.source[0]
    if not isinstance(module, nn.Module):
        return set()
    lists = (nn.ModuleList, nn.ModuleDict)
    return {name for name, each in module.named_modules() if isinstance(each, lists)}


def _find_batch_symbols(captured: CapturedModel) -> set[str]:
    """Return the names of the symbols that are sizes of batch dims."""
    dims = {spec.name: spec.batch_dim for spec in captured.inputs}
    return {symbol for symbol, (name, dim) in captured.symbols.items() if dims.get(name) == dim}


def _find_row_dim(value: fx.Node, symbols: set[str]) -> int | None:
    """Return the dim that grows with the batch, None if there is none."""
    for dim, size in enumerate(value.meta["val"].shape):
        if isinstance(size, torch.SymInt):
            if {str(symbol) for symbol in size.node.expr.free_symbols} & symbols:
                return dim
    return None


def _add_sums(graph: fx.Graph, value: fx.Node, dim: int | None) -> fx.Node:
    """Add the sums over each row of a value; return [rows, columns], or [columns] without rows."""
    mode = fake_mode(graph)

    def call(target: Any, *args: Any) -> fx.Node:
        return add_call(graph, target, args, like=value, mode=mode)

    rank = value.meta["val"].dim()
    others = [at for at in range(rank) if at != dim]
    values = call(ATEN.to.dtype, value, torch.float32)
    if not others:  # Each row is one element, or the value has no dims.
        values, others = call(ATEN.unsqueeze.default, values, rank), [rank]
    # Infinity minus infinity is not a number, so the difference is 0 for finite elements only.
    finite = call(ATEN.eq.Scalar, call(ATEN.sub.Tensor, values, values), 0.0)
    kept = call(ATEN.where.ScalarOther, finite, values, 0.0)

    def add(each: fx.Node) -> fx.Node:
        return call(ATEN.sum.dim_IntList, call(ATEN.to.dtype, each, torch.float32), others)

    sums = [
        add(finite), add(kept), add(call(ATEN.mul.Tensor, kept, kept)),
        call(ATEN.amax.default, call(ATEN.abs.default, kept), others),
        add(call(ATEN.eq.Scalar, values, 0.0)), add(call(ATEN.logical_not.default, finite)),
    ]  # fmt: skip
    return call(ATEN.stack.default, sums, 0 if dim is None else 1)
