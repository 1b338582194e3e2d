"""CUDA graphs of a stage: its forward and backward are recorded once and replayed.

A replay launches all kernels of a stage by one call of the host, so small kernels are not limited
by the host. A graph reads and writes memory at fixed addresses. Each microbatch in flight therefore
has a recording of its own, inputs are copied into it, and results are copied out of it. Parameters
are updated in place, which a replay sees. A microbatch of other shapes runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpart.accelerator import CUDA
from fxpart.errors import FxpartError, Problem, error
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.schedule.spec import list_schedules

Tensors = tuple[torch.Tensor, ...]
# Records a function: returns its results, and what computes them again in place.
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], object]]]
WARM_UP = 3  # Calls before the recording, in which libraries allocate what they keep.
_WHERE = "cuda_graphs=True"


def record_on_cuda(run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
    """Record the kernels of a function, which is called without executing them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    return found, graph.replay


def graph_stages(
    mesh_ranks: Sequence[MeshRank],
    devices: Sequence[torch.device],
    *,
    recompute: Mapping[int, Any],
    splits: bool,
    compiles: bool,
    record: Record = record_on_cuda,
) -> list[GraphedForward]:
    """Run the stage modules of these mesh ranks by CUDA graphs from their first call on.

    recompute: by stage, its recompute mode. splits: backwards are split. compiles: torch.compile is
    used, too. record: records a function. Raises FXP109 with every reason why they cannot be.
    """
    problems = list(_find_problems(mesh_ranks, devices, recompute, splits, compiles))
    if problems:
        raise FxpartError(problems)
    made = []
    for mesh_rank in mesh_ranks:
        for stage, module in mesh_rank.modules.items():
            made.append(GraphedForward(module, mesh_rank.list_written(stage), record))
            vars(module)["forward"] = made[-1]
    return made


class GraphedForward:
    """The forward of a stage module that replays recordings. recordings: all that were made."""

    def __init__(self, module: nn.Module, written: Sequence[torch.Tensor], record: Record) -> None:
        """module: its own forward is that of its class. written: the state that it writes."""
        self._module, self._written, self._record = module, tuple(written), record
        self._parameters = tuple(p for p in module.parameters() if p.requires_grad)
        self._free: list[RecordedStage] = []
        self.recordings: list[RecordedStage] = []

    def __call__(self, key: int, *inputs: torch.Tensor) -> Tensors:
        """Return the outputs of the stage."""
        own = type(self._module).forward
        if not torch.is_grad_enabled() or not self._fits(inputs):
            found: Tensors = own(self._module, key, *inputs)
            return found
        if not self._free:
            made = RecordedStage(
                lambda *given: own(self._module, key, *given), inputs, self._parameters,
                self._written, self._record,
            )  # fmt: skip
            self.recordings.append(made)
            self._free.append(made)
        use = _RecordingUse(self._free.pop(), self._free)
        outputs: Tensors = _Replay.apply(use, *inputs, *self._parameters)  # type: ignore[no-untyped-call]
        return outputs

    def _fits(self, inputs: Tensors) -> bool:
        """Return whether the recordings, if any, are of inputs like these."""
        return not self.recordings or self.recordings[0].forms == [_form(x) for x in inputs]


class _RecordingUse:
    """The use of a recording by one microbatch, until its backward or its autograd graph ends."""

    def __init__(self, recording: RecordedStage, free: list[RecordedStage]) -> None:
        self.recording, self._free = recording, free
        self._ended = False

    def end(self) -> None:
        """Return the recording to the unused ones, once."""
        if not self._ended:
            self._ended = True
            self._free.append(self.recording)

    def __del__(self) -> None:
        self.end()


class RecordedStage:
    """The recorded forward and backward of a stage, and the memory that they read and write."""

    def __init__(
        self,
        run: Callable[..., Tensors],
        inputs: Tensors,
        parameters: Tensors,
        written: Tensors,
        record: Record,
    ) -> None:
        """inputs: an example. written: state that keeps its values, which calls may change."""
        self._run, self._parameters = run, parameters
        self.forms = [_form(x) for x in inputs]
        self._inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        before = [tensor.detach().clone() for tensor in written]
        try:
            self._warm_up()
            self._results, self._replay_forward = record(self._forward)
            self.differentiable = [x.requires_grad for x in self._results]
            self._given = tuple(torch.zeros_like(x) for x in self._results if x.requires_grad)
            self._gradients, self._replay_backward = record(self._backward)
        except RuntimeError as cause:
            raise error(
                "FXP109", where=_WHERE, why=f"a stage cannot be recorded: {cause}",
                fix="leave the option out; a recorded stage cannot read values on the host",
            ) from cause  # fmt: skip
        with torch.no_grad():
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the outputs for other inputs, in memory of their own."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.detach().copy_(given)
        self._replay_forward()
        return tuple(x.detach().clone() for x in self._results)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """Yield the gradients of the inputs and parameters for those of the outputs."""
        given = [g for g, wanted in zip(gradients, self.differentiable, strict=True) if wanted]
        for own, gradient in zip(self._given, given, strict=True):
            own.zero_() if gradient is None else own.copy_(gradient)
        self._replay_backward()
        found = iter(self._gradients)
        for tensor in (*self._inputs, *self._parameters):
            gradient = next(found) if tensor.requires_grad else None
            # Autograd adds to a gradient in place, but takes over the first one as it is.
            added = tensor.is_leaf and tensor.grad is not None
            yield gradient if gradient is None or added else gradient.clone()

    def _warm_up(self) -> None:
        if not self._inputs or self._inputs[0].device.type != CUDA:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._results = self._forward()
                self._given = tuple(torch.zeros_like(x) for x in self._results if x.requires_grad)
                self._backward()
        torch.cuda.current_stream().wait_stream(side)

    def _forward(self) -> Tensors:
        with torch.enable_grad():
            self._live = self._run(*self._inputs)
        return self._live

    def _backward(self) -> list[torch.Tensor | None]:
        outputs = [x for x in self._live if x.requires_grad]
        wanted = [t for t in (*self._inputs, *self._parameters) if t.requires_grad]
        return list(torch.autograd.grad(outputs, wanted, self._given, allow_unused=True))


class _Replay(torch.autograd.Function):
    """A stage as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, use: _RecordingUse, *tensors: torch.Tensor) -> Tensors:
        recording = use.recording
        outputs = recording.forward(tensors[: len(recording.forms)])
        ctx.use = use
        ctx.set_materialize_grads(False)
        fixed = zip(outputs, recording.differentiable, strict=True)
        ctx.mark_non_differentiable(*[x for x, wanted in fixed if not wanted])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        use, ctx.use = ctx.use, None
        found = tuple(use.recording.backward(gradients))
        use.end()
        return None, *found


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device, x.requires_grad


def _find_problems(
    mesh_ranks: Sequence[MeshRank],
    devices: Sequence[torch.device],
    recompute: Mapping[int, Any],
    splits: bool,
    compiles: bool,
) -> Iterator[Problem]:
    """Yield why these stages cannot be recorded."""
    others = sorted({device.type for device in devices} - {CUDA})
    if others:
        why = f"its ranks compute on {', '.join(others)}, and CUDA graphs record GPUs' kernels"
        yield Problem("FXP109", _WHERE, why, "leave the option out")
    spec: ProgramSpec = mesh_ranks[0].spec
    if spec.sharding is not None:
        why = "the ranks of a stage call collectives inside it, whose order the host decides"
        yield Problem("FXP109", _WHERE, why, 'use one rank per stage: constraints={"mesh": "none"}')
    if any(stage.random_ops for stage in spec.stages):
        why = "the stages draw random numbers, whose seed the host sets for each microbatch"
        yield Problem("FXP109", _WHERE, why, "train without dropout, or leave the option out")
    if recompute:
        why = "a stage that recomputes its activations runs piece by piece"
        yield Problem("FXP109", _WHERE, why, 'use recompute="none"')
    if splits:
        why = "the schedule splits backwards, and a recorded backward cannot be split"
        whole = list_schedules(trains=True, flushes=True, splits_backward=False)
        yield Problem("FXP109", _WHERE, why, f"use schedule {' or '.join(whole)}")
    if compiles:
        why = "compile_stages is given, too; its code would be recorded before it is compiled"
        yield Problem("FXP109", _WHERE, why, "use one of the two options")
    yield from _find_symbolic_sizes(spec)


def _find_symbolic_sizes(spec: ProgramSpec) -> Iterator[Problem]:
    for stage in spec.stages:
        names = [v.name for v in stage.inputs if any(isinstance(s, str) for s in v.shape[1:])]
        if names:
            why = f"the sizes of {', '.join(names)} vary, and a recording has fixed ones"
            yield Problem("FXP109", _WHERE, why, "pad the batches to one size")
