"""From a request to a :class:`Captured`: trace in the first way that works, describe the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fxpart.capture.batch import Parts, look_up, put_together
from fxpart.capture.calling import Call
from fxpart.capture.captured import Captured
from fxpart.capture.causes import problems_of, summary_of
from fxpart.capture.dims import Inferred, resize
from fxpart.capture.fakes import as_meta, faked, stand_in
from fxpart.capture.fxtrace import name_state, symbolic_trace
from fxpart.capture.modes import ModuleModes, cache_off, prepared, training_mode
from fxpart.capture.outputs import Form
from fxpart.capture.precision import autocast_dtype
from fxpart.capture.pretrained import config_text
from fxpart.capture.python_state import PythonState
from fxpart.capture.replay import Repeats
from fxpart.capture.state import State, loss_prefix, slots_of, state_of
from fxpart.capture.trace import WAYS, NoWayError, Way, first_that_works, run_export
from fxpart.capture.unlift import Unlifted, unlift
from fxpart.capture.whole import Whole
from fxpart.compat import size_hint, symbol_names, uncompiled
from fxpart.errors import FxpartError
from fxpart.pipeline.autocast import WHOLE_KEY
from fxpart.pipeline.regions import check_regions
from fxpart.program import InputSpec


@dataclass(frozen=True)
class Request:
    """One call of :func:`~fxpart.capture.capture`, its example inputs taken apart.

    floating: the names of the floating outputs, and form: the structure that the model returns,
    where it could be run. precision: "fp32" or
    "bf16". loss_name: the output that is the loss where none was given. assigned: registered
    buffers to which forward assigns new tensors.
    """

    model: nn.Module
    loss: Callable[..., Any] | None
    parts: Parts
    call: Call
    names: tuple[str, ...]
    inferred: Inferred
    batch_size: int
    microbatch_size: int | None
    training: bool
    floating: frozenset[str] | None = None
    form: Form | None = None
    precision: str = "fp32"
    loss_name: str | None = None
    assigned: frozenset[tuple[str, str]] = frozenset()

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast around the model, None without."""
        return autocast_dtype(self.precision)

    @property
    def batch_dims(self) -> tuple[int | None, ...]:
        """Per tensor, the dim of the batch."""
        return self.inferred.dims

    def resized(self, rows: int) -> list[torch.Tensor]:
        """The example's tensors with ``rows`` rows."""
        pairs = zip(self.parts.tensors, self.batch_dims, strict=True)
        return [resize(t, d, rows) for t, d in pairs]


def run(request: Request) -> Captured:
    """Trace one request in the first way that works and assemble the result."""
    with uncompiled(request.model, request.loss):
        return _run(request)


def _run(request: Request) -> Captured:
    start = time.perf_counter()
    model = request.model
    prefix = loss_prefix(model)
    state = state_of(model, request.loss, prefix)
    whole = Whole(model, request.loss, request.call, request.autocast)
    whole.floating, whole.loss_name = request.floating, request.loss_name
    whole.assigned, whole.states_kept = request.assigned, True
    size = request.microbatch_size or request.batch_size
    has_rows = any(dim is not None for dim in request.batch_dims)
    with prepared(model, request.training, request.loss), faked(model) as mode:
        python = PythonState.of(model, request.loss)

        def attempt(way: Way) -> Unlifted:
            tensors = request.resized(max(size, 2) if way.symbolic else size)
            if way.method == "symbolic-trace":
                with python.unchanged():
                    traced = symbolic_trace(whole, tensors)
                return name_state(traced, request.names, state, prefix)
            if mode is not None:
                tensors = [stand_in(mode, t) for t in tensors]
            exported = _export(whole, tensors, request.batch_dims, way, python)
            return unlift(exported, request.names, state, prefix)

        # torch.fx's way records no autocast: its graph would be another model's.
        runs = mode is None and request.autocast is None
        ways = [way for way in WAYS if _possible(way, has_rows=has_rows, runs=runs)]
        try:
            way, unlifted, failures = first_that_works(ways, attempt)
        except NoWayError as none:
            raise FxpartError(
                problems_of([(way.label, failure) for way, failure in none.failures])
            ) from none
    check_regions(unlifted.graph.graph)
    if request.autocast is not None:
        unlifted.graph.meta[WHOLE_KEY] = True
    tried = tuple(f"{way.label}: {summary_of(failure)}" for way, failure in failures)
    if request.inferred.note:
        tried = (request.inferred.note, *tried)
    result = _assemble(request, way, unlifted, state, tried)
    return replace(result, seconds=time.perf_counter() - start)


def _export(
    whole: Whole,
    tensors: Sequence[torch.Tensor],
    batch_dims: Sequence[int | None],
    way: Way,
    python: PythonState,
) -> ExportedProgram:
    """torch.export in one way, equal layers traced once; in full where that does not work."""
    if not way.strict:
        repeats = Repeats(whole)
        try:
            with repeats.watching():
                return run_export(whole, tensors, batch_dims, way, python)
        except Exception:  # torch.export raises many unrelated types
            if not repeats.doubtful:
                raise
    return run_export(whole, tensors, batch_dims, way, python)


def _possible(way: Way, *, has_rows: bool, runs: bool) -> bool:
    """Symbols need a batch dim; torch.fx's way runs the model on data, as it is."""
    return (has_rows or not way.symbolic) and (runs or way.method != "symbolic-trace")


def _assemble(
    request: Request, way: Way, unlifted: Unlifted, state: State, tried: tuple[str, ...]
) -> Captured:
    inputs, symbols, hints = _describe(unlifted, request)
    return Captured(
        graph=unlifted.graph,
        inputs=inputs,
        constants=request.parts.constants,
        outputs=unlifted.outputs,
        output_dims=tuple(request.inferred.outputs.get(name) for name in unlifted.outputs),
        form=request.form,
        microbatch_size=None if way.symbolic else request.microbatch_size or request.batch_size,
        symbols=symbols,
        hints=hints,
        state={n: as_meta(t) for n, t in {**state.tensors, **unlifted.constants}.items()},
        parameters=state.parameters,
        persistent=state.persistent,
        aliases=state.aliases,
        method=way.method,
        symbolic=way.symbolic,
        batch_size=request.batch_size,
        loss_kind=unlifted.loss_kind,
        model_name=type(request.model).__name__,
        training=request.training,
        precision=request.precision,
        tried=tried,
        again=lambda training, size=request.microbatch_size: run(
            replace(request, training=training, microbatch_size=size)
        ),
        eager=lambda batch: run_eagerly(request, batch),
        example=lambda: _example(request),
        config=config_text(request.model),
        slots=slots_of(state, request.model, request.loss, loss_prefix(request.model)),
        mode_change=ModuleModes(request.model, request.loss),
        source=(request.model, request.loss),
    )


def _describe(
    unlifted: Unlifted, request: Request
) -> tuple[tuple[InputSpec, ...], dict[str, tuple[str, int]], dict[str, int]]:
    """The input specs, where each symbol is read from, and the size it had when traced."""
    values = {n.name: n.meta["val"] for n in unlifted.graph.graph.nodes if n.op == "placeholder"}
    inputs: list[InputSpec] = []
    symbols: dict[str, tuple[str, int]] = {}
    hints: dict[str, int] = {}
    for name, path, batch_dim in zip(
        unlifted.placeholders, request.parts.paths, request.batch_dims, strict=True
    ):
        value = values[name]
        shape = tuple(symbol_names(size) for size in value.shape)
        for dim, (text, size) in enumerate(zip(shape, value.shape, strict=True)):
            if isinstance(text, str) and text.isidentifier() and text not in symbols:
                symbols[text] = (name, dim)
                hints[text] = size_hint(size)
        dtype = str(value.dtype).removeprefix("torch.")
        inputs.append(
            InputSpec(name=name, path=path, dtype=dtype, shape=shape, batch_dim=batch_dim)
        )
    return tuple(inputs), symbols, hints


def _example(request: Request) -> Any:
    """The example as a global batch: its rows cut or repeated to the batch size."""
    return put_together(request.parts.tree, request.resized(request.batch_size))


def run_eagerly(request: Request, batch: Any) -> tuple[torch.Tensor, ...]:
    """The user's own module and loss on a batch object: ``(loss, *outputs)``, with autograd."""
    tensors = tuple(look_up(batch, path) for path in request.parts.paths)
    whole = Whole(request.model, request.loss, request.call, request.autocast)
    whole.loss_name = request.loss_name
    plain = uncompiled(request.model, request.loss)
    with plain, cache_off(request.model), training_mode(request.model, request.training):
        returned = whole(tensors)
    loss = next(v for k, v in returned.items() if k.startswith("loss/"))
    return (loss, *(v for k, v in returned.items() if not k.startswith("loss/")))
