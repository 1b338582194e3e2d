"""Regions of a stage for torch.compile: a graph for each distinct block, which equal blocks share.

The code of a stage is straight-line code, so its ops are traced, not analyzed. It is cut where a
numbered module of the model starts (``layers.3``), and around collectives, which call the
communicator of the running rank. Regions that occur once are joined; equal ones are compiled once,
because parameters are operands. Sizes and seeds of random ops are computed between regions, so
that no graph depends on their values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from fxpart.compat import compiler_errors
from fxpart.runtime.executor.random_in_graph import call_with_seed, make_seed

Region = Callable[..., Any]


@dataclass
class RegionCompiler:
    """Compiles regions; equal regions of all stages of a process are one function.

    backend: of torch.compile. faults: why regions run in eager mode, with counts.
    """

    backend: str
    faults: dict[str, int] = field(default_factory=dict)
    _known: dict[Any, Region] = field(default_factory=dict)

    @property
    def regions(self) -> int:
        """Return the number of distinct regions."""
        return len(self._known)

    def install(self, module: nn.Module) -> None:
        """Run the module's code through compiled regions. No other thread may run modules now."""
        blocks = [name for name in vars(type(module)) if name.startswith("block_")]
        for name in blocks or ["forward"]:
            graph = _RegionGraph(module, _trace(module, name), self).build()
            code: Any = type(fx.GraphModule(module, graph)).forward
            code.__name__, code.__wrapped__ = name, getattr(type(module), name)
            setattr(module, name, MethodType(code, module))

    def region(self, key: Any, graph: fx.Graph) -> Region:
        """Return the compiled function of a region; the same for equal keys."""
        if key not in self._known:
            self._known[key] = self._compile(fx.GraphModule(nn.Module(), graph))
        return self._known[key]

    def _compile(self, code: fx.GraphModule) -> Region:
        compiled = torch.compile(code, backend=self.backend, fullgraph=True)
        running, finished = [compiled], [False]
        lock = RLock()  # Ranks of one process are threads, of which one compiles.

        def region(*given: Any) -> Any:
            try:
                if finished[0]:
                    return running[0](*given)
                with lock:
                    found = running[0](*given)
                    finished[0] = True
                return found
            except compiler_errors() as fault:
                why = str(fault).strip().partition("\n")[0]
                self.faults[why] = self.faults.get(why, 0) + 1
                running[0] = code
                return code(*given)

        return region


class _StageTracer(fx.Tracer):
    """Traces one function of a stage module; every op is a node, also one of constants."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.traced_func_name = name


def _trace(module: nn.Module, name: str) -> fx.Graph:
    """Return the graph of one function of a stage module, with ops as nodes."""
    names = getattr(type(module), name).__globals__
    stage_device = torch.device(getattr(module, "device", "cpu"))
    tracer = _StageTracer(name)

    def as_node(op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> fx.Proxy:
            args = tuple(
                vars(arg)["traced_op"] if isinstance(arg, FunctionType) else arg for arg in args
            )
            return tracer.create_proxy("call_function", op, args, kwargs)

        call.traced_op = op  # type: ignore[attr-defined]
        return call

    def is_node(leaf: Any) -> str:
        if not isinstance(leaf, fx.Proxy):
            return ""
        return "i" if _is_size(leaf.node) else "t"

    def seeded(key: Any, index: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        seed = tracer.create_proxy("call_function", make_seed, (key, index), {})
        return call_with_seed(seed, op.traced_op, args, kwargs, is_node, as_node, stage_device)

    replaced: dict[str, Any] = {
        key: as_node(held) for key, held in names.items() if isinstance(held, torch._ops.OpOverload)
    }
    replaced |= {"max": as_node(max), "min": as_node(min)}
    if "seeded" in names:
        replaced["seeded"] = seeded
    if isinstance(names.get("collectives"), ModuleType):
        replaced["collectives"] = _CollectiveNodes(module, names["collectives"], as_node)
    before = dict(names)
    names.update(replaced)
    try:
        return tracer.trace(module)
    finally:
        names.update(before)
        for key in replaced.keys() - before.keys():
            del names[key]


class _CollectiveNodes:
    """Replaces the module of collectives while a stage is traced."""

    def __init__(
        self, stage: Any, module: ModuleType, as_node: Callable[[Any], Callable[..., Any]]
    ) -> None:
        self._stage, self._module, self._as_node = stage, module, as_node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            def bound(*given: Any, **named: Any) -> Any:
                return function(self._stage.mesh, *given, **named)

            bound.__name__, bound.__module__ = name, "collectives"
            bound.__wrapped__ = function  # type: ignore[attr-defined]
            return self._as_node(bound)(*args, **kwargs)

        return call


def _is_size(node: fx.Node) -> bool:
    """Return whether the node is an integer: a size of a tensor, or computed from sizes."""
    if node.op == "call_method":
        return node.target == "size"
    arithmetic = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    inputs = node.all_input_nodes
    return (
        arithmetic
        and getattr(operator, getattr(node.target, "__name__", ""), None) is node.target
        and node.target is not operator.getitem
        and bool(inputs)
        and all(map(_is_size, inputs))
    ) or (arithmetic and node.target in (max, min) and all(map(_is_size, inputs)))


def _is_outside(node: fx.Node) -> bool:
    """Return whether the node runs between regions: a size, a seed or a collective."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return _is_outside(node.all_input_nodes[0])
    return node.target is make_seed or _is_bound_collective(node) or _is_size(node)


def _is_bound_collective(node: fx.Node) -> bool:
    return getattr(node.target, "__wrapped__", None) is not None


class _RegionGraph:
    """Builds the graph of a function whose nodes are regions, and what runs between them."""

    def __init__(self, module: nn.Module, graph: fx.Graph, compiler: RegionCompiler) -> None:
        self.module, self.source, self.compiler = module, graph, compiler
        names: Mapping[str, str] = getattr(type(module).forward, "__globals__", {}).get("NAMES", {})
        self.names = names
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def build(self) -> fx.Graph:
        """Return the graph."""
        pieces = _join_single(list(self._pieces()), self._key)
        for outside, nodes in pieces:
            if outside:
                for node in nodes:
                    self.env[node] = self.graph.node_copy(node, self._value)
            else:
                self._add_region(nodes)
        (output,) = self.source.find_nodes(op="output")
        self.graph.output(fx.node.map_arg(output.args[0], self._value))
        return self.graph

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self.env and node.op == "get_attr":
            self.env[node] = self.graph.node_copy(node)
        return self.env[node]

    def _pieces(self) -> Iterator[tuple[bool, list[fx.Node]]]:
        """Yield runs of nodes outside of regions, and regions of one numbered module each.

        Sizes and seeds come before the region that they would divide.
        """
        waiting: list[fx.Node] = []
        layer = ""
        for node in self.source.nodes:
            if node.op in ("output", "get_attr"):
                continue
            outside = _is_outside(node)
            if outside and not _divides(node, set(waiting)):
                yield True, [node]
                continue
            found = "" if outside else self._layer(node)
            if outside or (found and found != layer):
                if waiting:
                    yield False, waiting
                waiting = []
            if outside:
                yield True, [node]
                continue
            layer = found or layer
            waiting.append(node)
        if waiting:
            yield False, waiting

    def _layer(self, node: fx.Node) -> str:
        """Return the first numbered module whose state the op reads; "" if it reads none.

        State outside of numbered modules counts as one module.
        """
        for used in node.all_input_nodes:
            name = self.names.get(str(used.target), "") if used.op == "get_attr" else ""
            if name:
                parts = name.split(".")
                digits = [i for i, part in enumerate(parts) if part.isdigit()]
                return ".".join(parts[: digits[0] + 1]) if digits else "."
        return ""

    def _key(self, nodes: Sequence[fx.Node]) -> Any:
        """Return what equal regions have in common: ops, arguments, and the form of operands."""
        takes, gives = _bounds(nodes)
        place: dict[fx.Node, Any] = {node: ("given", i) for i, node in enumerate(takes)}
        place |= {node: ("made", i) for i, node in enumerate(nodes)}
        rows = [
            (node.target, repr(fx.node.map_arg((node.args, node.kwargs), place.__getitem__)))
            for node in nodes
        ]
        return tuple(rows), tuple(map(self._form, takes)), tuple(place[n] for n in gives)

    def _form(self, node: fx.Node) -> Any:
        """Return shape and dtype of state; of other operands only whether they are sizes."""
        if node.op != "get_attr":
            return _is_size(node)
        held = getattr(self.module, str(node.target))
        return tuple(held.shape), held.dtype, held.requires_grad, type(held).__name__

    def _add_region(self, nodes: Sequence[fx.Node]) -> None:
        takes, gives = _bounds(nodes)
        inner, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, node in enumerate(takes):
            env[node] = inner.placeholder(f"given_{i}")
        for node in nodes:
            env[node] = inner.node_copy(node, env.__getitem__)
        inner.output(tuple(env[node] for node in gives))
        region = self.compiler.region(self._key(nodes), inner)
        made = self.graph.call_function(region, tuple(map(self._value, takes)))
        for i, node in enumerate(gives):
            self.env[node] = self.graph.call_function(operator.getitem, (made, i))


def _divides(node: fx.Node, waiting: set[fx.Node]) -> bool:
    """Return whether a node outside of regions needs results of the region before it."""
    return _is_bound_collective(node) or any(used in waiting for used in node.all_input_nodes)


def _bounds(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values from before the nodes that they use, and theirs that are used later."""
    inside = set(nodes)
    takes = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    gives = [node for node in nodes if any(user not in inside for user in node.users)]
    return list(takes), gives


def _join_single(
    pieces: list[tuple[bool, list[fx.Node]]], key: Callable[[Sequence[fx.Node]], Any]
) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Join adjacent regions that occur once."""
    keys = [None if outside else key(nodes) for outside, nodes in pieces]
    joined: list[fx.Node] = []
    for (outside, nodes), own in zip(pieces, keys, strict=True):
        if not outside and keys.count(own) == 1:
            joined += nodes
            continue
        if joined and (not outside or _divides(nodes[0], set(joined))):
            yield False, joined
            joined = []
        yield outside, nodes
    if joined:
        yield False, joined
