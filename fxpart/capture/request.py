"""Process a capture request: trace with the first method that works, describe the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fxpart.capture.batch_dims import BatchDimInference, resize
from fxpart.capture.branch_proof import (
    NegatedBranchError,
    prove_branches,
)
from fxpart.capture.call_arguments import CallArguments
from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.context_managers import (
    ModuleModes,
    cache_off,
    prepare_capture,
    training_mode,
)
from fxpart.capture.empty_selections import Branch, Branches
from fxpart.capture.failure_causes import problems_of, summarize_exception
from fxpart.capture.fake_tensors import (
    as_meta,
    make_fake,
    number_fixed_sizes,
    replace_with_fakes,
)
from fxpart.capture.flat_batch import FlatBatch, look_up, unflatten_batch
from fxpart.capture.forward_gradients import gradients_recorded, refuse_gradients
from fxpart.capture.fx_trace import name_state, symbolic_trace
from fxpart.capture.layer_replay import LayerReplay
from fxpart.capture.mask_origins import UnknownOriginError
from fxpart.capture.model_outputs import Form
from fxpart.capture.model_tensors import ModelTensors, loss_prefix, slots_of, state_of
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.precision import autocast_dtype
from fxpart.capture.python_state import PythonState
from fxpart.capture.trace_methods import (
    WAYS,
    AllTraceMethodsFailedError,
    TraceMethod,
    run_export,
    run_first_successful,
)
from fxpart.capture.unlift import UnliftedGraph, unlift
from fxpart.compat import keep_gpu_autocast, size_hint, symbol_names, unwrap_compiled
from fxpart.compiler.autocast_region import DEVICES_KEY, WHOLE_KEY
from fxpart.compiler.float8_linear import KEY as FLOAT8_KEY
from fxpart.compiler.higher_order_ops import check_regions
from fxpart.compiler.node_annotation import SKIPPED_KEY
from fxpart.errors import FxpartError
from fxpart.program.spec import InputSpec


@dataclass(frozen=True)
class CaptureRequest:
    """One call of :func:`~fxpart.capture.capture`, with flattened example inputs.

    floating: names of the floating-point outputs, and form: the structure that the model returns,
    if it could run. precision: "fp32" or "bf16". loss_name: the output that is the loss if none was
    given. assigned: registered buffers to which forward assigns new tensors. device_type: of the
    ranks, by default that of the module.
    """

    model: nn.Module
    loss: Callable[..., Any] | None
    parts: FlatBatch
    call: CallArguments
    names: tuple[str, ...]
    inferred: BatchDimInference
    batch_size: int
    microbatch_size: int | None
    training: bool
    floating: frozenset[str] | None = None
    form: Form | None = None
    precision: str = "fp32"
    loss_name: str | None = None
    assigned: frozenset[tuple[str, str]] = frozenset()
    device_type: str | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast around the model; None without autocast."""
        return autocast_dtype(self.precision)

    @property
    def batch_dims(self) -> tuple[int | None, ...]:
        """The batch dim of each tensor."""
        return self.inferred.dims

    def resized(self, rows: int) -> list[torch.Tensor]:
        """Return the example's tensors with ``rows`` rows."""
        pairs = zip(self.parts.tensors, self.batch_dims, strict=True)
        return [resize(t, d, rows) for t, d in pairs]


def trace_request(request: CaptureRequest) -> CapturedModel:
    """Trace one request with the first method that works, and assemble the result."""
    with unwrap_compiled(request.model, request.loss):
        return _run(request)


def _run(request: CaptureRequest) -> CapturedModel:
    start = time.perf_counter()
    model = request.model
    prefix = loss_prefix(model)
    state = state_of(model, request.loss, prefix)
    whole = ModelWithLoss(model, request.loss, request.call, request.autocast)
    whole.floating, whole.loss_name = request.floating, request.loss_name
    whole.assigned, whole.states_kept = request.assigned, True
    size = request.microbatch_size or request.batch_size
    has_rows = any(dim is not None for dim in request.batch_dims)
    gpu = keep_gpu_autocast() if request.device_type == "cuda" else nullcontext()
    with (
        gpu,
        prepare_capture(model, request.training, request.loss),
        replace_with_fakes(model) as mode,
    ):
        python = PythonState.of(model, request.loss)

        def attempt(way: TraceMethod) -> UnliftedGraph:
            tensors = request.resized(max(size, 2) if way.symbolic else size)
            if way.method == "symbolic-trace":
                with python.unchanged(), gradients_recorded():
                    traced = symbolic_trace(whole, tensors)
                refuse_gradients(traced.graph, "torch.export cannot trace the model")
                return name_state(traced, request.names, state, prefix)
            if mode is not None:
                tensors = [make_fake(mode, t) for t in tensors]
            exported = _export_proven(whole, tensors, request.batch_dims, way, python)
            return unlift(exported, request.names, state, prefix)

        # torch.fx tracing does not record autocast.
        runs = mode is None and request.autocast is None
        ways = [way for way in WAYS if _possible(way, has_rows=has_rows, runs=runs)]
        try:
            way, unlifted, failures = run_first_successful(ways, attempt)
        except AllTraceMethodsFailedError as none:
            raise FxpartError(
                problems_of([(way.label, failure) for way, failure in none.failures])
            ) from none
    check_regions(unlifted.graph.graph)
    number_fixed_sizes(unlifted.graph)
    if request.autocast is not None:
        unlifted.graph.meta[WHOLE_KEY] = True
    if request.precision == "fp8":
        unlifted.graph.meta[FLOAT8_KEY] = True
    unlifted.graph.meta[DEVICES_KEY] = (whole.kind, request.device_type or whole.kind)
    tried = tuple(f"{way.label}: {summarize_exception(failure)}" for way, failure in failures)
    if request.inferred.note:
        tried = (request.inferred.note, *tried)
    result = _assemble(request, way, unlifted, state, tried)
    return replace(result, seconds=time.perf_counter() - start)


def _export_proven(
    whole: ModelWithLoss,
    tensors: Sequence[torch.Tensor],
    batch_dims: Sequence[int | None],
    way: TraceMethod,
    python: PythonState,
) -> ExportedProgram:
    """Run torch.export; raise its error for a branch on data that may compute something else."""
    negated: frozenset[str] = frozenset()
    while True:
        branches = Branches(negated=negated)
        exported = _export(whole, tensors, batch_dims, way, python, branches)
        if not branches.found:
            return exported

        def trace(
            is_empty: Callable[[str, int | None], bool], negated: frozenset[str] = negated
        ) -> tuple[ExportedProgram, Sequence[Branch]]:
            other = Branches(is_empty, negated)
            return run_export(whole, tensors, batch_dims, way, python, other), other.found

        try:
            skips = prove_branches(exported, branches.found, negated, trace)
        except NegatedBranchError as found:
            if not negated:
                negated = found.lines
                continue
        except UnknownOriginError:
            pass
        else:
            lines = dict.fromkeys(branch.line for branch in branches.found) if skips else ()
            exported.graph_module.meta[SKIPPED_KEY] = tuple(lines)
            return exported
        return _export(whole, tensors, batch_dims, way, python, Branches(decides=False))


def _export(
    whole: ModelWithLoss,
    tensors: Sequence[torch.Tensor],
    batch_dims: Sequence[int | None],
    way: TraceMethod,
    python: PythonState,
    branches: Branches,
) -> ExportedProgram:
    """Run torch.export with layer replay, and again in full if it fails or would hide branches."""
    if not way.strict:
        repeats = LayerReplay(whole)
        try:
            with repeats.watching():
                exported = run_export(whole, tensors, batch_dims, way, python, branches)
            if not (branches.found and repeats.repeated):
                return exported
        except Exception:  # torch.export raises many unrelated types
            if not repeats.doubtful:
                raise
    return run_export(whole, tensors, batch_dims, way, python, branches)


def _possible(way: TraceMethod, *, has_rows: bool, runs: bool) -> bool:
    """Return whether a method applies: symbols need a batch dim, torch.fx needs real data."""
    return (has_rows or not way.symbolic) and (runs or way.method != "symbolic-trace")


def _assemble(
    request: CaptureRequest,
    way: TraceMethod,
    unlifted: UnliftedGraph,
    state: ModelTensors,
    tried: tuple[str, ...],
) -> CapturedModel:
    inputs, symbols, hints = _describe(unlifted, request)
    return CapturedModel(
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
        again=lambda training, size=request.microbatch_size: trace_request(
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
    unlifted: UnliftedGraph, request: CaptureRequest
) -> tuple[tuple[InputSpec, ...], dict[str, tuple[str, int]], dict[str, int]]:
    """Return the input specs, where each symbol is read from, and its traced size."""
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


def _example(request: CaptureRequest) -> Any:
    """Return the example as a global batch, with its rows cut or repeated to the batch size."""
    return unflatten_batch(request.parts.tree, request.resized(request.batch_size))


def run_eagerly(request: CaptureRequest, batch: Any) -> tuple[torch.Tensor, ...]:
    """Run the user's module and loss on a batch object: ``(loss, *outputs)``, with autograd."""
    tensors = tuple(look_up(batch, path) for path in request.parts.paths)
    whole = ModelWithLoss(request.model, request.loss, request.call, request.autocast)
    whole.loss_name = request.loss_name
    plain = unwrap_compiled(request.model, request.loss)
    with plain, cache_off(request.model), training_mode(request.model, request.training):
        returned = whole(tensors)
    loss = next(v for k, v in returned.items() if k.startswith("loss/"))
    return (loss, *(v for k, v in returned.items() if not k.startswith("loss/")))


def config_text(model: nn.Module) -> str:
    """Return the text of ``config.json``; "" for a model without a configuration."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(type(model), "from_pretrained"):
        return ""
    found: dict[str, Any] = json.loads(config.to_json_string())
    found["architectures"] = [type(model).__name__]
    return json.dumps(found, indent=2, sort_keys=True) + "\n"
