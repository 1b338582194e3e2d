"""capture(): from a module and example inputs to a :class:`CapturedModel`."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fxpart.capture.autograd_functions import find_custom_backwards, keep_custom_backwards
from fxpart.capture.batch_dims import infer, settled
from fxpart.capture.call_arguments import CallArguments, input_names, split_batch_arguments
from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.context_managers import prepare_capture, training_mode
from fxpart.capture.example_inputs import infer_examples, no_examples
from fxpart.capture.failure_causes import summarize_exception
from fxpart.capture.fake_tensors import replace_with_fakes
from fxpart.capture.flat_batch import (
    FlatBatch,
    assemble,
    distinct,
    flatten_batch,
    on_device_of,
    unflatten_batch,
)
from fxpart.capture.function_calls import find_calls
from fxpart.capture.model_outputs import ambiguous_loss
from fxpart.capture.model_validation import plain_module
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.precision import autocast_dtype
from fxpart.capture.request import CaptureRequest, trace_request
from fxpart.capture.shape_probe import ShapeProbe
from fxpart.compat import unwrap_compiled, unwrapped
from fxpart.compiler.node_annotation import SKIPPED_KEY
from fxpart.errors import FxpartError, Problem, error

_TRACING = threading.RLock()  # Tracing replaces functions of torch, for all threads.
_LOSS_NAME = re.compile(r"((total|train|training|model)_?)?loss|objective|cost|nll|elbo")


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
    device_type: str | None = None,
) -> CapturedModel:
    """Capture an unmodified model as a torch.fx graph.

    example_inputs: a tuple of positional inputs, or a dict of keyword inputs, including loss
    targets; inferred if None (see :mod:`fxpart.capture.example_inputs`). loss: a function of the
    output and the targets; without it, the output's own loss, its only scalar with a gradient, or
    the mean square of its floating-point tensors. batch_size: rows of the global batch, by default
    those of the example. batch_dims: per input name, the batch dim, None for an input that is not
    split; other inputs are inferred. microbatch_size: the capture size if the batch cannot be
    symbolic. precision: "bf16" for ``torch.autocast`` in bfloat16 around model and loss, whose
    conversions become graph operations; "fp32" for the model's own precision. device_type: "cpu" or
    "cuda", the devices whose autocast applies; by default that of the model's tensors, to which
    example tensors are copied. The model's modes, configuration and tensors do not change.
    Errors: FXP101 to FXP106, FXP108, FXP109.
    """
    plain, loss = plain_module(model), unwrapped(loss)
    with _TRACING, unwrap_compiled(plain, loss) as compiled:
        captured = _captured(
            plain, example_inputs, example_kwargs, loss, batch_dims, batch_size, microbatch_size,
            training, precision, device_type,
        )  # fmt: skip
    if compiled or plain is not model:
        note = "torch.compile is ignored; parameter names are those of the original module"
        captured = replace(captured, tried=(*captured.tried, note))
    return captured


def _captured(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    loss: Callable[..., Any] | None,
    batch_dims: Mapping[str, int | None] | None,
    batch_size: int | None,
    microbatch_size: int | None,
    training: bool,
    precision: str,
    device_type: str | None,
) -> CapturedModel:
    """Capture an unwrapped module; see :func:`capture`."""
    autocast = autocast_dtype(precision)
    if example_inputs is None and not example_kwargs:
        example_inputs = infer_examples(model, batch_size)
    batch = assemble(example_inputs, example_kwargs)
    parts = on_device_of(model, distinct(flatten_batch(batch)))
    has_kwargs = bool(example_kwargs) and isinstance(batch, tuple)
    call = split_batch_arguments(model, loss, parts, has_kwargs=has_kwargs)
    initialize_lazy(model, call, parts)
    names = unique_names(input_names(parts, call, model, loss))
    if not parts.tensors:
        raise no_examples(model)
    known = settled(batch_dims or {}, names, parts.tensors)
    with prepare_capture(model, training, loss), replace_with_fakes(model) as mode:
        trial = ShapeProbe(ModelWithLoss(model, loss, call, autocast), mode)
        inferred = infer(trial, names, parts.tensors, known)
        backwards = find_custom_backwards(trial, parts.tensors) if inferred.ran else []
        calls = find_calls(lambda: trial.returned(parts.tensors)) if backwards else []
    _warn_about_written_inputs([names[i] for i in sorted(trial.written)])
    sizes = {t.shape[d] for t, d in zip(parts.tensors, inferred.dims, strict=True) if d is not None}
    rows = min(sizes, default=1)
    _check_sizes(batch_size, microbatch_size, has_rows=bool(sizes))
    request = CaptureRequest(
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
        loss_name=_own_loss_name(trial.whole.scalars),
        precision=precision,
        device_type=device_type,
        assigned=trial.whole.assigned,
    )
    captured = trace_request(request)
    _warn_about_skipped_weights(captured.graph.meta.get(SKIPPED_KEY, ()))
    if backwards:
        captured = keep_custom_backwards(captured, backwards, calls, request)
    if request.loss_name is not None:
        captured = _with_own_loss(captured, trial.whole.scalars)
    return captured


def _warn_about_written_inputs(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"FXP113: forward writes {', '.join(names)} in place; a trainer leaves its batches "
            "unchanged, so a batch that is passed again has not the values that it has in plain "
            "PyTorch; compute new tensors instead",
            stacklevel=3,
        )


def _warn_about_skipped_weights(lines: Sequence[str]) -> None:
    if lines:
        warnings.warn(
            f"FXP113: {', '.join(lines)}: forward skips weights for which no row is selected; "
            "they get zero gradients, so weight decay and momentum change them; plain PyTorch "
            "leaves them without a gradient; remove the branch to have the same",
            stacklevel=3,
        )


def _own_loss_name(scalars: Mapping[str, str]) -> str | None:
    """Return the output that is the loss if none was given.

    Raise FXP106 if several outputs qualify, or if the only one is named like a part of a loss.
    """
    if len(scalars) > 1:
        names = ", ".join(scalars)
        why = f"no loss was given, and several scalar outputs may be the loss: {names}"
        raise ambiguous_loss(scalars, why)
    for name, path in scalars.items():
        key = re.search(r"(?:\.|\[')(\w+)(?:'\])?$", path)  # no match for an index of a tuple
        if key is not None and not _LOSS_NAME.fullmatch(key[1]):
            why = f"no loss was given, and the only scalar, {name}, may be only a part of a loss"
            raise ambiguous_loss(scalars, why)
    return next(iter(scalars), None)


def _with_own_loss(captured: CapturedModel, scalars: Mapping[str, str]) -> CapturedModel:
    """Record which output is the loss; raise FXP106 if it does not depend on the inputs."""
    reached: set[fx.Node] = set()
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" or any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    loss = captured.graph.graph.output_node().args[0][0]  # type: ignore[index]
    (name, path), *_ = scalars.items()
    if loss not in reached:
        why = f"no loss was given, and the only scalar, {name}, does not depend on the inputs"
        fix = "pass loss= to compile(), a function of the output and the targets"
        raise error("FXP106", where=path, why=why, fix=fix)
    note = f"loss: the output {name} ({path}), the only scalar with a gradient"
    return replace(captured, tried=(*captured.tried, note))


def _check_sizes(batch_size: int | None, microbatch_size: int | None, *, has_rows: bool) -> None:
    """Raise FXP109 for invalid sizes, or sizes without a batch dim."""
    problems = []
    for name, size in (("batch_size", batch_size), ("microbatch_size", microbatch_size)):
        if size is None:
            continue
        if size < 1:
            why = "it must be at least 1"
            problems.append(Problem("FXP109", f"{name}={size}", why, "pass the number of rows"))
        elif size > 1 and not has_rows:
            why = "no input has a batch dim"
            problems.append(Problem("FXP109", f"{name}={size}", why, "remove the argument"))
    if problems:
        raise FxpartError(problems)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as unique Python identifiers."""
    result: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name) or "input_0"
        plain = f"_{plain}" if plain[0].isdigit() else plain
        fresh, count = plain, 1
        while fresh in result or fresh == "rng_key":
            fresh, count = f"{plain}_{count}", count + 1
        result.append(fresh)
    return tuple(result)


def initialize_lazy(model: nn.Module, call: CallArguments, parts: FlatBatch) -> None:
    """Run a model with lazy modules once on the example, as PyTorch requires before training.

    The run has no gradients and is in evaluation mode, so it draws random numbers only for the new
    parameters and changes no running statistics. Raise FXP108 if the model cannot run.
    """
    names = _uninitialized(model)
    if not names:
        return
    tensors = tuple(t.detach().clone() for t in parts.tensors)
    failure = ""
    try:
        with torch.no_grad(), training_mode(model, False):
            model(*unflatten_batch(call.args, tensors), **unflatten_batch(call.kwargs, tensors))
    except Exception as raised:  # the user's module may raise anything
        failure = f"; the model fails on the example inputs: {summarize_exception(raised)}"
    names = _uninitialized(model)
    if names:
        raise error(
            "FXP108",
            where=", ".join(names[:3]),
            why=f"parameters of lazy modules have no shape before the first forward{failure}",
            fix="call the model once on a batch before compile()",
        )


def _uninitialized(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without a shape."""
    kinds = (UninitializedParameter, UninitializedBuffer)
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if isinstance(tensor, kinds)]
