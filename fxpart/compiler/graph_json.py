"""A graph as JSON and back, without pickle: ops by name, state by shape, values computed anew.

Only the inputs' shapes are stored; every other value comes from running the rebuilt graph on fake
tensors. State comes back on the meta device: passes look at shapes, never at data.
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
    LANE_KEY,
    LEVEL_KEY,
    MESH_KEY,
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
    """Plain dicts, lists, strings and numbers."""
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


def _attribute_out(held: Any) -> Json:
    """State by its shape, or the graph of a region."""
    if isinstance(held, fx.GraphModule):
        return {"graph": graph_to_json(held)}
    return {
        "shape": list(held.shape),
        "stride": list(held.stride()),
        "dtype": plain_name(held.dtype),
        "parameter": isinstance(held, torch.nn.Parameter),
        "trained": bool(held.requires_grad),
    }


def _node_out(node: fx.Node, hints: dict[str, int], mesh: Mesh | None) -> Json:
    """One node; inputs with their shapes, symbols by name."""
    known = annotation(node)
    result: dict[str, Json] = {
        "op": node.op,
        "name": node.name,
        "target": encode(node.target),
        "args": encode(list(node.args)),
        "kwargs": encode(dict(node.kwargs)),
        "annotation": {
            "module": known.module,
            "source": known.source,
            "requires_grad": known.requires_grad,
            "random": known.random,
            "block": known.block,
            "stage": known.stage,
            "saved": [[s.storage, str(s.size), s.source] for s in known.saved],
        },
    }
    if mesh is not None and known.sharding is not None:
        result["annotation"]["sharding"] = sharding_to_json(known.sharding, mesh)
    if node.op == "placeholder":
        result["value"] = _input_out(value(node), hints)
    elif node.op == "get_attr" and isinstance(value(node), torch.Tensor):
        result["value"] = {"device": str(value(node).device)}
    return result


def _input_out(held: Any, hints: dict[str, int]) -> Json:
    """An input's shape; a dim that is a symbol by name, with its size when it was traced."""
    if not isinstance(held, torch.Tensor):
        return {"number": held if isinstance(held, (bool, int, float)) else hint(held)}
    shape: list[int | str] = []
    for size in held.shape:
        known = expression(size)
        if not isinstance(known, int):
            hints[str(known)] = hint(size)
        shape.append(known if isinstance(known, int) else str(known))
    return {
        "shape": shape,
        "dtype": plain_name(held.dtype),
        "device": str(held.device),
        "contiguous": held.is_contiguous() if all(isinstance(s, int) for s in shape) else True,
    }


def graph_from_json(data: Mapping[str, Json]) -> fx.GraphModule:
    """The graph again, with fake values of its own.

    torch.fx writes the names of a graph into code that it runs, so they are looked at first:
    ValueError for one that is no name. Raises whatever torch does where it cannot be rebuilt.
    """
    return _build(data, fake_mode(symbolic=True))


def _build(data: Mapping[str, Json], mode: Any) -> fx.GraphModule:
    """A module and the regions in it."""
    hints = _distinct(data["symbols"])
    root: dict[str, Any] = {}
    for name, held in data["attributes"].items():
        root[name] = _build(held["graph"], mode) if "graph" in held else _state_in(held)
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
            held = root[item["target"]]
            with mode:
                node.meta["val"] = torch.empty_strided(
                    held.shape, held.stride(), dtype=held.dtype, device=item["value"]["device"]
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
    """What becomes text of the graph's code: only words."""
    op, target = item["op"], item["target"]
    if op not in ("placeholder", "get_attr", "call_function", "output"):
        raise ValueError(f"{str(op)[:80]!r} is no kind of node")
    words = [item["name"], *item["kwargs"].get("dict", ())]
    if op != "call_function" and not _PLACE.fullmatch(target):
        raise ValueError(f"{target[:80]!r} is no place in a model")
    for word in [*words, target] if op == "placeholder" else words:
        if not _NAME.fullmatch(word):
            raise ValueError(f"{word[:80]!r} is no name")


def _distinct(hints: Mapping[str, int]) -> dict[str, int]:
    """Sizes for the symbols, no two alike: equal sizes would become one symbol."""
    after: dict[int, int] = {}  # of a size that is taken: from where on to look for a free one
    result = {}
    for name, size in sorted(hints.items()):
        if not isinstance(size, int) or size >= 1 << 62:
            raise ValueError(f"{quoted(size)} is no size")
        free, passed = max(size, 2), []
        while free in after:
            passed.append(free)
            free = after[free]
        after |= dict.fromkeys([*passed, free], free + 1)
        result[name] = free
    return result


def _run(module: fx.GraphModule, mode: Any, inputs: Iterator[Any] | None = None) -> list[Any]:
    """Give every node its value by running the graph on fake tensors; returns the outputs.

    inputs: the operands of a region; None for the whole graph, whose inputs have values.
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
    """What the node calls; a collective with a communicator that knows shapes alone."""
    if not is_collective(node.target):
        return node.target
    return bind_fake_communicator(node.target, module.meta[MESH_KEY], module.meta[LANE_KEY])


def _region(options: Sequence[Any]) -> AbstractContextManager[Any]:
    """What holds inside a region: autocast if it has the four options of one; gradients are off."""
    if len(options) != 4:
        return nullcontext()
    device, dtype, enabled, cache = options
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def _state_in(held: Mapping[str, Json]) -> torch.Tensor:
    """State of the same shape on the meta device."""
    tensor = torch.empty_strided(
        held["shape"], held["stride"], dtype=constant(held["dtype"], torch.dtype), device="meta"
    )
    if held["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=held["trained"])
    return tensor


def _input_in(held: Mapping[str, Json], mode: Any, hints: Mapping[str, int]) -> Any:
    """A fake input, its symbolic dims being symbols again."""
    if "number" in held:
        return held["number"]
    unknown = [s for s in held["shape"] if isinstance(s, str) and not s.isidentifier()]
    if unknown:
        raise error("FXP900", where="rebuilding a graph", why=f"an input has the size {unknown[0]}")
    sizes = [hints[s] if isinstance(s, str) else s for s in held["shape"]]
    dynamic = [isinstance(s, str) for s in held["shape"]]
    kind = constant(held["dtype"], torch.dtype)
    meta = torch.empty(sizes, dtype=kind, device=held["device"])
    return symbolic_input(mode, meta, dynamic)


def _annotation_in(held: Mapping[str, Json], mesh: str) -> NodeAnnotation:
    """The annotation; a saved tensor's size that was an expression comes back as one symbol."""
    import sympy

    saved = tuple(
        SavedTensor(number, int(size) if size.isdigit() else sympy.Symbol(size), source)
        for number, size, source in held["saved"]
    )
    found = {**held, "saved": saved}
    if "sharding" in held:
        found["sharding"] = sharding_from_json(held["sharding"], Mesh.parse(mesh))
    return NodeAnnotation(**found)
