"""capture(): from a module and example inputs to a :class:`Captured`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fxpart.capture.accepted import plain_module
from fxpart.capture.batch import assemble, distinct, take_apart
from fxpart.capture.calling import divide, input_names
from fxpart.capture.captured import Captured
from fxpart.capture.dims import infer, settled
from fxpart.capture.examples import infer_examples, no_examples
from fxpart.capture.fakes import faked
from fxpart.capture.gradients import check_gradients, own_backwards
from fxpart.capture.modes import prepared
from fxpart.capture.precision import autocast_dtype
from fxpart.capture.request import Request, run
from fxpart.capture.trial import Trial
from fxpart.capture.whole import Whole
from fxpart.errors import FxpartError, Problem


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
    precision: str = "fp32",
) -> Captured:
    """Capture an unmodified model as a torch.fx graph.

    example_inputs: a tuple of positional inputs, or a dict of keyword inputs, loss targets
    included; inferred where None (see :mod:`fxpart.capture.examples`). loss: a function of the
    output and the targets; without it the output's own loss, or the mean square of its floating
    tensors. batch_size: rows of the global batch, by default those of the example. batch_dims: per
    input name the dim of the batch, None for an input that is not cut; the rest is inferred.
    microbatch_size: the size to capture at where the batch cannot be symbolic. precision: "bf16"
    for ``torch.autocast`` in bfloat16 around model and loss, whose conversions are then operations
    of the graph; "fp32" as the model is. The model's modes,
    configuration and tensors are left as they were. Errors: FXP101 to FXP106, FXP108, FXP109.
    """
    model, autocast = plain_module(model), autocast_dtype(precision)
    if example_inputs is None and not example_kwargs:
        example_inputs = infer_examples(model, batch_size)
    batch = assemble(example_inputs, example_kwargs)
    parts = distinct(take_apart(batch))
    has_kwargs = bool(example_kwargs) and isinstance(batch, tuple)
    call = divide(model, loss, parts, has_kwargs=has_kwargs)
    names = unique_names(input_names(parts, call, model, loss))
    if not parts.tensors:
        raise no_examples(model)
    known = settled(batch_dims or {}, names, parts.tensors)
    with prepared(model, training), faked(model) as mode:
        trial = Trial(Whole(model, loss, call, autocast), mode)
        inferred = infer(trial, names, parts.tensors, known)
        backwards = own_backwards(trial, parts.tensors) if inferred.ran else []
    sizes = {t.shape[d] for t, d in zip(parts.tensors, inferred.dims, strict=True) if d is not None}
    rows = min(sizes, default=1)
    _check_sizes(batch_size, microbatch_size, has_rows=bool(sizes))
    request = Request(
        model=model,
        loss=loss,
        parts=parts,
        call=call,
        names=names,
        inferred=inferred,
        batch_size=batch_size or rows,
        microbatch_size=microbatch_size,
        training=training,
        floating=trial.whole.floating,
        form=trial.whole.form,
        precision=precision,
        assigned=trial.whole.assigned,
    )
    captured = run(request)
    if not backwards:
        return captured
    note = check_gradients(captured, backwards, request)
    return replace(captured, tried=(*captured.tried, note))


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
