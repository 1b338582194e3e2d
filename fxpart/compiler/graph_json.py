"""Convert a graph to JSON and back without pickle.

Ops are stored by name and state by shape. Only the shapes of inputs are stored; all other values
are recomputed on fake tensors. State is loaded on the meta device, since passes need shapes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxpart.compat import fake_mode, python_dispatcher, symbolic_input
from fxpart.compiler.argument_json import Json, constant, decode, encode, plain_name
from fxpart.compiler.collective_calls import bind_fake_communicator, is_collective
from fxpart.compiler.graph_edit import annotation, value
from fxpart.compiler.node_annotation import (
    BLOCKS_KEY,
    KEY,
    LEVEL_KEY,
    MESH_KEY,
    MESH_RANK_KEY,
    NO_CUT_KEY,
    BlockInfo,
    Level,
    NodeAnnotation,
    SavedTensor,
)
from fxpart.compiler.sharding_json import (
    mesh_from_json,
    mesh_to_json,
    sharding_from_json,
    sharding_to_json,
)
from fxpart.compiler.tensor_sizes import expression, hint
from fxpart.errors import error, quoted
from fxpart.sharding import Mesh


def graph_to_json(module: fx.GraphModule) -> dict[str, Json]:
    """Return a graph as plain dicts, lists, strings and numbers."""
    hints: dict[str, int] = {}
    mesh = module.meta.get(MESH_KEY)
    nodes = [_node_out(n, hints, mesh) for n in module.graph.nodes]
    attributes = {
        str(n.target): _attribute_out(attrgetter(str(n.target))(module))
        for n in module.graph.nodes
        if n.op == "get_attr"
    }
    return {
        "level": module.meta[LEVEL_KEY].name if LEVEL_KEY in module.meta else None,
        "blocks": [[b.name, b.identity] for b in module.meta.get(BLOCKS_KEY, ())],
        "no_cut": list(module.meta.get(NO_CUT_KEY, ())),
        "symbols": hints,
        "attributes": attributes,
        "nodes": nodes,
        **mesh_to_json(module),
    }


def _attribute_out(entry: Any) -> Json:
    """Return the shape and dtype of a state tensor, or the graph of a region."""
    if isinstance(entry, fx.GraphModule):
        return {"graph": graph_to_json(entry)}
    return {
        "shape": list(entry.shape),
        "stride": list(entry.stride()),
        "dtype": plain_name(entry.dtype),
        "parameter": isinstance(entry, torch.nn.Parameter),
        "trained": bool(entry.requires_grad),
    }


def _node_out(node: fx.Node, hints: dict[str, int], mesh: Mesh | None) -> Json:
    """Return one node; inputs include their shapes, with symbols by name."""
    note = annotation(node)
    result: dict[str, Json] = {
        "op": node.op,
        "name": node.name,
        "target": encode(node.target),
        "args": encode(list(node.args)),
        "kwargs": encode(dict(node.kwargs)),
        "annotation": {
            "module": note.module,
            "source": note.source,
            "requires_grad": note.requires_grad,
            "random": note.random,
            "block": note.block,
            "stage": note.stage,
            "saved": [[s.storage, str(s.size), s.source] for s in note.saved],
        },
    }
    if mesh is not None and note.sharding is not None:
        result["annotation"]["sharding"] = sharding_to_json(note.sharding, mesh)
    if node.op == "placeholder":
        result["value"] = _input_out(value(node), hints)
    elif node.op == "get_attr" and isinstance(value(node), torch.Tensor):
        result["value"] = {"device": str(value(node).device)}
    return result


def _input_out(entry: Any, hints: dict[str, int]) -> Json:
    """Return an input's shape, with symbolic dims by name; record traced sizes in ``hints``."""
    if not isinstance(entry, torch.Tensor):
        return {"number": entry if isinstance(entry, (bool, int, float)) else hint(entry)}
    shape: list[int | str] = []
    for size in entry.shape:
        note = expression(size)
        if not isinstance(note, int):
            hints[str(note)] = hint(size)
        shape.append(note if isinstance(note, int) else str(note))
    return {
        "shape": shape,
        "dtype": plain_name(entry.dtype),
        "device": str(entry.device),
        "contiguous": entry.is_contiguous() if all(isinstance(s, int) for s in shape) else True,
    }


def graph_from_json(data: Mapping[str, Json]) -> fx.GraphModule:
    """Rebuild the graph, with new fake values.

    torch.fx writes names of the graph into generated code, so names are validated first: raise
    ValueError for an invalid name. Errors of torch are passed on if the graph cannot be rebuilt.
    """
    return _build(data, fake_mode(symbolic=True))


def _build(data: Mapping[str, Json], mode: Any) -> fx.GraphModule:
    """Build a module and the regions in it."""
    hints = _distinct(data["symbols"])
    root: dict[str, Any] = {}
    for name, entry in data["attributes"].items():
        root[name] = _build(entry["graph"], mode) if "graph" in entry else _state_in(entry)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for item in data["nodes"]:
        _check_names(item)
        node = graph.create_node(
            item["op"],
            decode(item["target"], nodes),
            tuple(decode(item["args"], nodes)),
            decode(item["kwargs"], nodes),
            name=item["name"],
        )
        nodes[item["name"]] = node
        node.meta[KEY] = _annotation_in(item["annotation"], data.get("mesh", ""))
        if item["op"] == "placeholder":
            node.meta["val"] = _input_in(item["value"], mode, hints)
        elif "value" in item:
            entry = root[item["target"]]
            with mode:
                node.meta["val"] = torch.empty_strided(
                    entry.shape, entry.stride(), dtype=entry.dtype, device=item["value"]["device"]
                )
    module = fx.GraphModule(root, graph)
    mesh_from_json(data, module)
    if data["level"] is not None:
        module.meta[LEVEL_KEY] = Level[data["level"]]
        _run(module, mode)
    if data["blocks"]:
        module.meta[BLOCKS_KEY] = tuple(BlockInfo(*b) for b in data["blocks"])
        module.meta[NO_CUT_KEY] = tuple(data["no_cut"])
    return module


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACE = re.compile(r"\w+(\.\w+)*")


def _check_names(item: Mapping[str, Json]) -> None:
    """Raise ValueError unless all text that enters generated code is a plain identifier."""
    op, target = item["op"], item["target"]
    if op not in ("placeholder", "get_attr", "call_function", "output"):
        raise ValueError(f"Unknown kind of node: {str(op)[:80]!r}")
    words = [item["name"], *item["kwargs"].get("dict", ())]
    if op != "call_function" and not _PLACE.fullmatch(target):
        raise ValueError(f"Invalid attribute path: {target[:80]!r}")
    for word in [*words, target] if op == "placeholder" else words:
        if not _NAME.fullmatch(word):
            raise ValueError(f"Invalid name: {word[:80]!r}")


def _distinct(hints: Mapping[str, int]) -> dict[str, int]:
    """Choose distinct sizes for the symbols, since torch merges symbols of equal size."""
    after: dict[int, int] = {}  # used size -> where to start the search for a free one
    result = {}
    for name, size in sorted(hints.items()):
        if not isinstance(size, int) or size >= 1 << 62:
            raise ValueError(f"Invalid size: {quoted(size)}")
        free, passed = max(size, 2), []
        while free in after:
            passed.append(free)
            free = after[free]
        after |= dict.fromkeys([*passed, free], free + 1)
        result[name] = free
    return result


def _run(module: fx.GraphModule, mode: Any, inputs: Iterator[Any] | None = None) -> list[Any]:
    """Compute the value of every node by running the graph on fake tensors; return the outputs.

    inputs: the operands of a region; None for the whole graph, whose inputs already have values.
    """
    env: dict[fx.Node, Any] = {}
    result: list[Any] = []
    with mode, torch.no_grad(), python_dispatcher():
        for node in module.graph.nodes:
            if node.op == "output":
                result = list(fx.node.map_arg(node.args[0], env.__getitem__))
                continue
            if node.op == "placeholder":
                env[node] = node.meta["val"] if inputs is None else next(inputs)
            elif node.op == "get_attr":
                env[node] = node.meta.get("val", attrgetter(str(node.target))(module))
            else:
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                body = next((i for i, a in enumerate(args) if isinstance(a, fx.GraphModule)), None)
                if body is None:
                    env[node] = _target(node, module)(*args, **kwargs)
                else:
                    with _region(args[:body]):
                        env[node] = _run(args[body], mode, iter(args[body + 1 :]))
            node.meta["val"] = None if isinstance(env[node], fx.GraphModule) else env[node]
    return result


def _target(node: fx.Node, module: fx.GraphModule) -> Any:
    """Return the callable of a node; collectives get a fake communicator."""
    if not is_collective(node.target):
        return node.target
    return bind_fake_communicator(node.target, module.meta[MESH_KEY], module.meta[MESH_RANK_KEY])


def _region(options: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return the context of a region: autocast if it has the four options of one, else none."""
    if len(options) != 4:
        return nullcontext()
    device, dtype, enabled, cache = options
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def _state_in(entry: Mapping[str, Json]) -> torch.Tensor:
    """Return a state tensor of the same shape on the meta device."""
    tensor = torch.empty_strided(
        entry["shape"], entry["stride"], dtype=constant(entry["dtype"], torch.dtype), device="meta"
    )
    if entry["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=entry["trained"])
    return tensor


def _input_in(entry: Mapping[str, Json], mode: Any, hints: Mapping[str, int]) -> Any:
    """Return a fake input whose symbolic dims are symbols again."""
    if "number" in entry:
        return entry["number"]
    unknown = [s for s in entry["shape"] if isinstance(s, str) and not s.isidentifier()]
    if unknown:
        why = f"an input has the unsupported size {unknown[0]}"
        raise error("FXP900", where="graph deserialization", why=why)
    sizes = [hints[s] if isinstance(s, str) else s for s in entry["shape"]]
    dynamic = [isinstance(s, str) for s in entry["shape"]]
    kind = constant(entry["dtype"], torch.dtype)
    meta = torch.empty(sizes, dtype=kind, device=entry["device"])
    return symbolic_input(mode, meta, dynamic)


def _annotation_in(entry: Mapping[str, Json], mesh: str) -> NodeAnnotation:
    """Return the annotation; a saved tensor's size expression becomes a single symbol."""
    import sympy

    saved = tuple(
        SavedTensor(number, int(size) if size.isdigit() else sympy.Symbol(size), source)
        for number, size, source in entry["saved"]
    )
    fields = {**entry, "saved": saved}
    if "sharding" in entry:
        fields["sharding"] = sharding_from_json(entry["sharding"], Mesh.parse(mesh))
    return NodeAnnotation(**fields)
