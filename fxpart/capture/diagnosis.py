"""diagnose(): the result of a capture, or its failure, as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from torch import fx, nn

from fxpart.capture.api import capture
from fxpart.capture.captured_model import CapturedModel
from fxpart.compiler import KEY, NodeAnnotation
from fxpart.compiler.effects import (
    is_random,
    list_written_nodes,
    packet_name,
    state_written,
    views,
)
from fxpart.errors import CODES, FxpartError
from fxpart.program.spec import InputSpec


class OpUse(msgspec.Struct, frozen=True, kw_only=True):
    """An op that needs care: its count and first location (module and source line)."""

    op: str
    count: int
    module: str
    source: str


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of a failed capture: the error's code and title, the line, the fix."""

    code: str
    title: str
    where: str
    why: str
    fix: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an attempt to capture a model; contains no torch objects.

    method, symbolic, loss_kind, batch_size: as in
    :class:`~fxpart.capture.captured_model.CapturedModel`; after a failed capture, method is "" and
    causes are given. seconds: total wall time. nodes: of the graph. parameters: number of parameter
    elements; frozen: those without gradient; unused: names of parameters that the loss does not
    read. ties: other name -> main name. random, in_place: such ops. buffers_written: buffers that
    forward changes. regions: higher-order ops (no_grad, autocast). notes: remarks for the user.
    """

    model: str
    method: str = ""
    symbolic: bool = False
    seconds: float = 0.0
    nodes: int = 0
    parameters: int = 0
    frozen: int = 0
    unused: tuple[str, ...] = ()
    ties: dict[str, str] = {}
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    loss_kind: str = ""
    batch_size: int = 0
    random: tuple[OpUse, ...] = ()
    in_place: tuple[OpUse, ...] = ()
    regions: tuple[OpUse, ...] = ()
    buffers_written: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    causes: tuple[FailureCause, ...] = ()

    @property
    def captured(self) -> bool:
        """Whether the model can be captured."""
        return not self.causes


def diagnose(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    training: bool = True,
    microbatch_size: int | None = None,
) -> Diagnosis:
    """Capture the model and describe the result; the arguments are those of :func:`capture`.

    A model that cannot be captured gives a diagnosis with causes, not an error.
    """
    start = time.perf_counter()
    try:
        captured = capture(
            model,
            example_inputs,
            example_kwargs,
            loss=loss,
            batch_size=batch_size,
            batch_dims=batch_dims,
            training=training,
            microbatch_size=microbatch_size,
        )
    except FxpartError as failure:
        return Diagnosis(
            model=type(model).__name__,
            seconds=time.perf_counter() - start,
            causes=tuple(
                FailureCause(
                    code=p.code, title=CODES[p.code][0], where=p.where, why=p.why, fix=p.fix
                )
                for p in failure.problems
            ),
        )
    return build_diagnosis(captured, time.perf_counter() - start)


def build_diagnosis(captured: CapturedModel, seconds: float = 0.0) -> Diagnosis:
    """Return the diagnosis of a captured model."""
    graph = captured.graph.graph
    read = {str(n.target) for n in graph.nodes if n.op == "get_attr" and n.users}
    trained = [name for name in captured.parameters if captured.state[name].requires_grad]
    frozen = [name for name in captured.parameters if not captured.state[name].requires_grad]
    changed = {name for names in state_written(graph).values() for name in names}
    changed |= {name for node in graph.nodes if _is_region(node) for name in _written_inside(node)}
    return Diagnosis(
        model=captured.model_name,
        method=captured.method,
        symbolic=captured.symbolic,
        seconds=seconds or captured.seconds,
        nodes=len(graph.nodes),
        parameters=sum(captured.state[name].numel() for name in captured.parameters),
        frozen=sum(captured.state[name].numel() for name in frozen),
        unused=tuple(name for name in trained if name not in read),
        ties=captured.aliases,
        inputs=captured.inputs,
        outputs=captured.outputs,
        loss_kind=captured.loss_kind,
        batch_size=captured.batch_size,
        random=_uses(_all_nodes(captured.graph), is_random),
        in_place=_uses(_all_nodes(captured.graph), _writes_in_place),
        regions=_uses(graph.nodes, _is_region),
        buffers_written=tuple(sorted(changed - set(captured.parameters))),
        tried=captured.tried,
        notes=tuple(_notes(captured)),
    )


def _all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of the graph and of its nested regions."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes


def _uses(nodes: Any, wanted: Callable[[fx.Node], bool]) -> tuple[OpUse, ...]:
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_function" and wanted(node):
            found.setdefault(packet_name(node.target) or str(node.target), []).append(node)
    uses = []
    for op, those in sorted(found.items()):
        place: NodeAnnotation = those[0].meta.get(KEY, NodeAnnotation())
        uses.append(OpUse(op=op, count=len(those), module=place.module, source=place.source))
    return tuple(uses)


def _writes_in_place(node: fx.Node) -> bool:
    """Return whether the op writes a value of the graph; batch_norm statistics do not count."""
    return bool(list_written_nodes(node)) and bool(views(node))


def _is_region(node: fx.Node) -> bool:
    """Return whether a node runs a nested graph."""
    return _body(node) is not None


def _body(node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """Return a region's nested graph and the arguments for its placeholders."""
    owner = node.graph.owning_module
    for i, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = getattr(owner, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                return body, node.args[i + 1 :]
    return None


def _written_inside(region: fx.Node) -> Iterator[str]:
    """Yield the names of the state that a region's ops write, through views."""
    found = _body(region)
    assert found is not None, "the node is a region"
    body, arguments = found
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    outside = dict(zip(placeholders, arguments, strict=False))
    roots: dict[fx.Node, set[fx.Node]] = {n: {n} for n in placeholders}
    for node in body.graph.nodes:
        if node.op == "call_function":
            roots[node] = {r for v in views(node) for r in roots.get(v, ())}
            for target in list_written_nodes(node):
                for root in roots.get(target, ()):
                    state = outside.get(root)
                    if isinstance(state, fx.Node) and state.op == "get_attr":
                        yield str(state.target)


def _notes(captured: CapturedModel) -> Iterator[str]:
    if not captured.symbolic:
        size = captured.microbatch_size
        yield f"captured at a fixed size: every microbatch must have {size} rows"
    if captured.loss_kind == "mean-square":
        yield "no loss: the mean square of the outputs is used, for comparison and costs only"
    whole = [i.name for i in captured.inputs if i.batch_dim is None]
    if whole:
        yield f"not split over microbatches: {', '.join(whole)}"
    norms = [
        n
        for n in captured.graph.graph.nodes
        if n.op == "call_function"
        and packet_name(n.target) == "aten.batch_norm"
        and list_written_nodes(n)
    ]
    if norms:
        yield "batch normalization in training mode: statistics are computed per microbatch"
    if any(t.device.type == "meta" for t in captured.state.values()):
        yield "the model has no data: it can be planned, and its weights can be loaded later"
