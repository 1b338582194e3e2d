"""Generate the Python module of a stage: one operation per line, freed after its last use.

No name of the model ever becomes executable code.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fxpart.codegen.dataflow import find_lookup_ops, format_node, outputs_of
from fxpart.codegen.identifiers import comment, identifier, place, quoted
from fxpart.codegen.literals import COLLECTIVES, MESH, NameScope, call
from fxpart.codegen.size_expressions import dim_text
from fxpart.codegen.stage_split import StageGraph
from fxpart.collectives import all_gather
from fxpart.compiler.graph_edit import annotation
from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import StateSpec

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "complex64": "c64",
    "complex128": "c128",
}


def emit(stage: StageGraph, *, blocks: bool = False) -> str:
    """Return the module's text: ``class Stage<k>`` with ``forward(key, *inputs) -> tuple``.

    ``lookups(*inputs)`` calls the lookups of row-sharded tables whose ids follow from the batch.

    blocks: make each block a method, which ``forward`` runs through ``self.call``; activation
    recomputation replaces ``self.call``. The text depends only on the graph: the same input gives
    the same bytes. Raise FXP108 with every argument or target that cannot be written.
    """
    names = NameScope()
    cls = f"Stage{stage.spec.index}"
    names.taken.add(cls)
    pieces = split_recompute_segments(stage.graph) if blocks else ()
    body = list(_forward(stage, names, pieces))
    sharded = COLLECTIVES in names.modules
    lines = [
        *_header(stage),
        "",
        "from __future__ import annotations",
        "",
        *_imports(names),
        "",
        *(f"{alias} = {path}" for alias, path in names.operations.items()),
        "",
        "# attribute -> the name in the model",
        "NAMES = {",
        *(f'    "{s.attribute}": {quoted(s.name)},' for s in stage.spec.state),
        "}",
        "",
        "",
        f"class {cls}(torch.nn.Module):",
        f"    INDEX = {stage.spec.index}",
        *(f"    {line}" for line in _gathers(stage)),
        "",
        '    def __init__(self, device: str | torch.device = "cpu") -> None:',
        "        super().__init__()",
        "        self.device = torch.device(device)  # where forward makes new tensors",
        *([f"        {MESH} = None  # set before the first call"] if sharded else []),
        *(["        self.call = lambda piece, *given: piece(*given)"] if pieces else []),
        *(f"        {line}" for state in stage.spec.state for line in _register(state)),
        "",
        *(f"    {line}" if line else "" for line in body),
    ]
    return "\n".join(lines) + "\n"


def _header(stage: StageGraph) -> Iterator[str]:
    spec = stage.spec
    trained = sum(_count(s) for s in spec.state if s.kind == "parameter" and s.requires_grad)
    total = sum(_count(s) for s in spec.state if s.kind == "parameter")
    model = comment(stage.model)
    yield f"# Stage {spec.index} of {model}, written by fxpart. One operation a line."
    text = ", ".join(map(comment, stage.blocks)) or "none"
    yield from textwrap.wrap(
        f"blocks: {text}", 98, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )
    yield f"# parameters: {total}" + (f", trained {trained}" if trained != total else "")
    for value, source in zip(spec.inputs, spec.sources, strict=True):
        origin = "user input" if source < 0 else f"from stage {source}"
        yield f"# takes {comment(value.name)}: {_spec_text(value.dtype, value.shape)}, {origin}"
    for value, targets in zip(spec.outputs, spec.targets, strict=True):
        goal = f"to stage {', '.join(map(str, targets))}" if targets else "result"
        yield f"# gives {comment(value.name)}: {_spec_text(value.dtype, value.shape)}, {goal}"


def _gathers(stage: StageGraph) -> Iterator[str]:
    """Yield the gathers of parameters with their arguments, by block, in order of the program."""
    attribute = {s.name: s.attribute for s in stage.spec.state if s.kind == "parameter"}
    found: list[tuple[int | None, tuple[Any, ...]]] = []
    for node in stage.graph.find_nodes(op="call_function", target=all_gather):
        shard, *how = node.args
        name = attribute.get(str(shard.target)) if isinstance(shard, fx.Node) else None
        how += [1] * (4 - len(how))  # the default of outer
        if name is not None and all(type(x) in (int, str) for x in how):
            found.append((annotation(node).block, (name, *how)))
    if found:
        yield "GATHERS = (  # by block: attribute, axis, dim, size of the whole dim, outer"
        for _, own in groupby(found, key=lambda one: one[0]):
            yield f"    ({', '.join(_literal(how) for _, how in own)},),"
        yield ")"


def _literal(how: Sequence[int | str]) -> str:
    return f"({', '.join(quoted(x) if isinstance(x, str) else str(x) for x in how)})"


def _count(state: StateSpec) -> int:
    total = 1
    for size in state.shape:
        total *= size
    return total


def _imports(names: NameScope) -> Iterator[str]:
    plain = names.modules - {"torch", "fxpart.rng", COLLECTIVES}
    for module in sorted(plain):
        yield f"import {module}"
    if plain:
        yield ""
    yield "import torch"
    if names.modules & {"fxpart.rng", COLLECTIVES}:
        yield ""
    if COLLECTIVES in names.modules:
        yield "from fxpart import collectives"
    if "fxpart.rng" in names.modules:
        yield "from fxpart.rng import seeded"


def _register(state: StateSpec) -> Iterator[str]:
    empty = f'torch.empty({tuple(state.shape)}, dtype=torch.{state.dtype}, device="meta")'
    if state.kind == "parameter":
        yield f"self.{state.attribute} = torch.nn.Parameter("
        yield f"    {empty}, requires_grad={state.requires_grad}"
        yield ")"
    else:
        yield "self.register_buffer("
        yield f'    "{state.attribute}",'
        yield f"    {empty},"
        yield f"    persistent={state.persistent},"
        yield ")"


def _forward(
    stage: StageGraph, names: NameScope, pieces: Sequence[RecomputeSegment]
) -> Iterator[str]:
    """Yield the lines of ``forward`` with its signature; record the names of operations."""
    graph = stage.graph
    key, *inputs = graph.find_nodes(op="placeholder")
    _define_operations(graph, names)
    names.values[key] = identifier("key", names.taken)
    for node, spec in zip(inputs, stage.spec.inputs, strict=True):
        names.values[node] = identifier(spec.name, names.taken)
    attribute = {s.name: s.attribute for s in stage.spec.state}
    for node in graph.find_nodes(op="get_attr"):
        names.values[node] = f"self.{attribute[str(node.target)]}"
    yield f"def forward({', '.join(['self', *(names.value(n) for n in (key, *inputs))])}):"
    last = _last_uses(graph)
    returned = _returned([_result(value, names) for value in outputs_of(graph)])
    if not pieces:
        ops = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
        yield from _lines(ops, names, last)
        yield returned
    for number, piece in enumerate(pieces):
        yield f"    {_calling(number, piece, key, names, last)}"
    if pieces:
        yield returned
    for number, piece in enumerate(pieces):
        takes = [names.value(n) for n in piece.takes if n is not key]
        yield ""
        yield f"def block_{number}({', '.join(['self', names.value(key), *takes])}):"
        outer = {*piece.takes, *piece.gives}
        inner = {op: [n for n in ended if n not in outer] for op, ended in last.items()}
        yield from _lines(piece.ops, names, inner)
        yield _returned([names.value(n) for n in piece.gives])
    if ops := find_lookup_ops(graph, stage.spec):
        yield ""
        yield f"def lookups({', '.join(['self', *(names.value(n) for n in inputs)])}):"
        yield from _lines(ops, names, {})


def _calling(
    number: int,
    piece: RecomputeSegment,
    key: fx.Node,
    names: NameScope,
    last: dict[fx.Node, list[fx.Node]],
) -> str:
    """Return the line of ``forward`` that runs a segment and frees values after their last use."""
    takes = [names.value(n) for n in piece.takes if n is not key]
    gives = [names.value(n) for n in piece.gives]
    given = ", ".join([f"self.block_{number}", names.value(key), *takes])
    text = f"self.call({given})"
    if gives:
        text = f"{', '.join(gives)}{',' if len(gives) == 1 else ''} = {text}"
    outer = {*piece.takes, *piece.gives}
    ended = [n for op in piece.ops for n in last.get(op, []) if n in outer]
    if ended:
        text += f"; del {', '.join(names.value(n) for n in ended)}"
    return text


def _lines(
    ops: Sequence[fx.Node], names: NameScope, last: dict[fx.Node, list[fx.Node]]
) -> Iterator[str]:
    section = ""
    for node in ops:
        heading = _section(node)
        if heading and heading != section:
            yield f"    # {heading}"
            section = heading
        yield f"    {_line(node, names, last.get(node, []))}"


def _returned(results: Sequence[str]) -> str:
    return f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})"


def _result(value: Any, names: NameScope) -> str:
    assert isinstance(value, fx.Node), "a stage returns tensors"
    return names.value(value)


def _define_operations(graph: fx.Graph, names: NameScope) -> None:
    """Name every operation before any value, and collect all unsupported arguments."""
    problems: list[Problem] = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            try:
                call(node, _DryRunNames(names), format_node(node))
            except FxpartError as found:
                problems.extend(found.problems)
    if problems:
        raise FxpartError(problems)


class _DryRunNames(NameScope):
    """Names that record operations but not values."""

    def __init__(self, names: NameScope) -> None:
        self.__dict__.update(names.__dict__)
        self.values = {}

    def value(self, node: fx.Node) -> str:
        """Return a dummy name."""
        return "_"


def _section(node: fx.Node) -> str:
    """Return the module path and source line, for the comment above a group of lines."""
    note = annotation(node)
    return "  ".join(t for t in (comment(note.module), place(note.source)) if t)


def _line(node: fx.Node, names: NameScope, ended: list[fx.Node]) -> str:
    expression = call(node, names, format_node(node))
    text = f"{names.value(node)} = {expression}" if node.users else expression
    if ended:
        text += f"; del {', '.join(names.value(n) for n in ended)}"
    value = _value_text(node.meta.get("val")) if node.users else ""
    return f"{text}  # {value}" if value else text


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each op to the tensors that it uses last."""
    seen: set[fx.Node] = set(graph.output_node().all_input_nodes)
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        for used in dict.fromkeys(node.all_input_nodes):
            if used not in seen:
                seen.add(used)
                if used.op != "get_attr" and not _is_number(used):
                    last.setdefault(node, []).append(used)
    return last


def _is_number(node: fx.Node) -> bool:
    """Return whether a value is the key or a size, which needs no explicit deletion."""
    value = node.meta.get("val")
    return value is None or isinstance(
        value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return _spec_text(dtype, tuple(dim_text(size) for size in value.shape))
    if isinstance(value, list | tuple):
        return f"({', '.join(_value_text(item) for item in value)})"
    return ""


def _spec_text(dtype: str, shape: tuple[int | str, ...]) -> str:
    return f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class RecomputeSegment:
    """Operations in order. takes, gives: values (no state) from before and after the segment.

    Activation recomputation stores only the values between segments.
    """

    ops: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def split_recompute_segments(graph: fx.Graph) -> tuple[RecomputeSegment, ...]:
    """Return the segments of a stage's graph; empty if there is only one.

    Operations without a block belong to the current segment.
    """
    stretches: list[list[fx.Node]] = []
    current: int | None = None
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        block = annotation(node).block
        if not stretches or (block is not None and current is not None and block != current):
            stretches.append([])
            current = None
        current = current if block is None else block
        stretches[-1].append(node)
    if len(stretches) < 2:
        return ()
    return tuple(_piece(ops) for ops in stretches)


def _piece(ops: list[fx.Node]) -> RecomputeSegment:
    own = set(ops)
    read = dict.fromkeys(n for op in ops for n in op.all_input_nodes)
    takes = tuple(n for n in read if n not in own and n.op != "get_attr")
    gives = tuple(op for op in ops if any(user not in own for user in op.users))
    return RecomputeSegment(tuple(ops), takes, gives)
