"""capture(): from a module and example inputs to a :class:`Captured`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fxpart.capture.batch import Parts, assemble, look_up, put_together, take_apart
from fxpart.capture.calling import Call, divide, input_names
from fxpart.capture.captured import Captured
from fxpart.capture.causes import problems_of, summary_of
from fxpart.capture.dims import Inferred, infer, resize, settled
from fxpart.capture.examples import infer_examples, no_examples
from fxpart.capture.fakes import as_meta, faked, stand_in
from fxpart.capture.modes import cache_off, prepared, training_mode
from fxpart.capture.state import State, loss_prefix, state_of
from fxpart.capture.trace import WAYS, NoWayError, Way, first_that_works, run_export
from fxpart.capture.trial import Trial
from fxpart.capture.unlift import Unlifted, unlift
from fxpart.capture.whole import Whole
from fxpart.compat import size_hint, symbol_names
from fxpart.errors import FxpartError, Problem
from fxpart.program import InputSpec


@dataclass(frozen=True)
class Request:
    """One call of :func:`capture`, its example inputs taken apart."""

    model: nn.Module
    loss: Callable[..., Any] | None
    parts: Parts
    call: Call
    names: tuple[str, ...]
    inferred: Inferred
    batch_size: int
    microbatch_size: int | None
    training: bool

    @property
    def batch_dims(self) -> tuple[int | None, ...]:
        """Per tensor, the dim of the batch."""
        return self.inferred.dims

    def resized(self, rows: int) -> list[torch.Tensor]:
        """The example's tensors with ``rows`` rows."""
        pairs = zip(self.parts.tensors, self.batch_dims, strict=True)
        return [resize(t, d, rows) for t, d in pairs]


def capture(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    training: bool = True,
    microbatch_size: int | None = None,
) -> Captured:
    """Capture an unmodified model as a torch.fx graph.

    example_inputs: a tuple of positional inputs, or a dict of keyword inputs, loss targets
    included; inferred where None (see :mod:`fxpart.capture.examples`). loss: a function of the
    output and the targets; without it the output's own loss, or the mean square of its floating
    tensors. batch_size: rows of the global batch, by default those of the example. batch_dims: per
    input name the dim of the batch, None for an input that is not cut; the rest is inferred.
    microbatch_size: the size to capture at where the batch cannot be symbolic. The model's modes,
    configuration and tensors are left as they were. Errors: FXP101 to FXP106, FXP108, FXP109.
    """
    if example_inputs is None and not example_kwargs:
        example_inputs = infer_examples(model, batch_size)
    batch = assemble(example_inputs, example_kwargs)
    parts = take_apart(batch)
    has_kwargs = bool(example_kwargs) and isinstance(batch, tuple)
    call = divide(model, loss, parts, has_kwargs=has_kwargs)
    names = unique_names(input_names(parts, call, model, loss))
    if not parts.tensors:
        raise no_examples(model)
    known = settled(batch_dims or {}, names, parts.tensors)
    with prepared(model, training), faked(model) as mode:
        inferred = infer(Trial(Whole(model, loss, call), mode), names, parts.tensors, known)
    sizes = {t.shape[d] for t, d in zip(parts.tensors, inferred.dims, strict=True) if d is not None}
    rows = min(sizes, default=1)
    _check_sizes(batch_size, microbatch_size, has_rows=bool(sizes))
    return run(
        Request(
            model=model,
            loss=loss,
            parts=parts,
            call=call,
            names=names,
            inferred=inferred,
            batch_size=batch_size or rows,
            microbatch_size=microbatch_size,
            training=training,
        )
    )


def _check_sizes(batch_size: int | None, microbatch_size: int | None, *, has_rows: bool) -> None:
    """FXP109 for sizes that are no sizes, or that no input has a dim for."""
    problems = []
    for name, size in (("batch_size", batch_size), ("microbatch_size", microbatch_size)):
        if size is None:
            continue
        if size < 1:
            why = "it must be at least 1"
            problems.append(Problem("FXP109", f"{name}={size}", why, "give the number of rows"))
        elif size > 1 and not has_rows:
            why = "no input has a batch dim"
            problems.append(Problem("FXP109", f"{name}={size}", why, "leave it out"))
    if problems:
        raise FxpartError(problems)


def run(request: Request) -> Captured:
    """Trace one request in the first way that works and assemble the result."""
    start = time.perf_counter()
    model = request.model
    prefix = loss_prefix(model)
    state = state_of(model, request.loss, prefix)
    whole = Whole(model, request.loss, request.call)
    size = request.microbatch_size or request.batch_size

    has_rows = any(dim is not None for dim in request.batch_dims)
    ways = [way for way in WAYS if has_rows or not way.symbolic]
    with prepared(model, request.training), faked(model) as mode:

        def attempt(way: Way) -> ExportedProgram:
            tensors = request.resized(max(size, 2) if way.symbolic else size)
            if mode is not None:
                tensors = [stand_in(mode, t) for t in tensors]
            return run_export(whole, tensors, request.batch_dims, way)

        try:
            way, exported, failures = first_that_works(ways, attempt)
        except NoWayError as none:
            raise FxpartError(
                problems_of([(way.label, failure) for way, failure in none.failures])
            ) from none
    unlifted = unlift(exported, request.names, state, prefix)
    tried = tuple(f"{way.label}: {summary_of(failure)}" for way, failure in failures)
    if request.inferred.note:
        tried = (request.inferred.note, *tried)
    result = _assemble(request, way, unlifted, state, tried)
    return replace(result, seconds=time.perf_counter() - start)


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
        tried=tried,
        again=lambda training: run(replace(request, training=training)),
        eager=lambda batch: run_eagerly(request, batch),
        example=lambda: _example(request),
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
    whole = Whole(request.model, request.loss, request.call)
    with cache_off(request.model), training_mode(request.model, request.training):
        returned = whole(tensors)
    loss = next(v for k, v in returned.items() if k.startswith("loss/"))
    return (loss, *(v for k, v in returned.items() if not k.startswith("loss/")))


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names as Python identifiers, each once."""
    result: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name) or "input_0"
        plain = f"_{plain}" if plain[0].isdigit() else plain
        fresh, count = plain, 1
        while fresh in result or fresh == "rng_key":
            fresh, count = f"{plain}_{count}", count + 1
        result.append(fresh)
    return tuple(result)
