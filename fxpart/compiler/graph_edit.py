"""Graph edits shared by passes: copy a graph, add a node with value and annotation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpart.compat import deferred_code
from fxpart.compiler.node_annotation import KEY, NodeAnnotation


def fork(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose graph can be changed; parameters, buffers and values are shared.

    The code of the copy is generated at its first call or by ``recompile()``.
    """
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    old = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    new = graph.output(output)
    new.meta = dict(old.meta)
    with deferred_code():
        result = fx.GraphModule(module, graph)
    result.meta = dict(module.meta)
    return result


def annotation(node: fx.Node) -> NodeAnnotation:
    """Return the node's annotation, or an empty one if it has none."""
    found = node.meta.get(KEY)
    return found if isinstance(found, NodeAnnotation) else NodeAnnotation()


def annotate(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's annotation."""
    node.meta[KEY] = replace(annotation(node), **changes)


def describe_node(node: fx.Node) -> str:
    """Describe a node in messages: its name, module path and source line."""
    known = annotation(node)
    parts = [f"node {node.name}"]
    if known.module:
        parts.append(f"in {known.module}")
    if known.source:
        parts.append(f"({known.source})")
    return " ".join(parts)


def value(node: Any) -> Any:
    """Return a node's abstract value (fake tensor, SymInt, list); other arguments unchanged."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def fake_mode(graph: fx.Graph) -> AbstractContextManager[Any]:
    """Return the fake-tensor mode of the graph's values; a null context without tensors."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode  # type: ignore[no-any-return]
    return nullcontext()


def add_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    mode: AbstractContextManager[Any],
    known: Any = None,
) -> fx.Node:
    """Add a call at the graph's insertion point, with a value and ``like``'s annotation.

    known: the value of the call if the caller has it; otherwise the op runs on the fake values of
    its arguments.
    """
    node = graph.call_function(target, args, kwargs or {})
    if known is None:
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs or {}), value)
        with mode, torch.no_grad():
            known = target(*fake_args, **fake_kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in _KEPT}
    node.meta["val"] = known
    node.meta[KEY] = annotation(like)
    return node


_KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
