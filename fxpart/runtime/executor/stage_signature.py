"""Lookup table of one stage for the executor, computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpart.collectives.gather_prefetch import BackwardGathers, BackwardScatters, ForwardGathers
from fxpart.collectives.parameter_regather import ParameterRegather
from fxpart.program.edges import ValueEdge
from fxpart.program.spec import ProgramSpec, StageSpec, has_backward
from fxpart.runtime.executor.activation_offload import ActivationOffload
from fxpart.runtime.executor.recompute import Mode, StageRecomputation
from fxpart.runtime.state.written_buffers import StepState


class SavedTensorPolicy:
    """Selects what autograd saves of a stage's forward: not the parameters gathered for it.

    recompute: calls the stage if its activations are not stored either. offload: copies what is
    saved to the host; None: it stays on the device.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        stage: StageSpec,
        module: nn.Module,
        recompute: Mode = "none",
        offload: bool = False,
    ) -> None:
        """Prepare hooks; only a stage with a sharded parameter can gather one."""
        self.offload = ActivationOffload(module) if offload else None
        self.recompute: StageRecomputation | None = None
        if recompute != "none":
            written = [state.attribute for state in stage.state if state.written]
            self.recompute = StageRecomputation(module, recompute, written)
            self.recompute.offloads = offload
            self._in_blocks = hasattr(module, "call")  # Its code marks the start of blocks.
        sharding = {} if spec.sharding is None else spec.sharding.state
        cut = any("S(" in sharding[s.name].placements for s in stage.state if s.name in sharding)
        self.regather = ParameterRegather() if cut else None
        self._blocks = getattr(module, "GATHERS", ())  # Of modules that fxpart has written.
        self._gathers: BackwardGathers | None = None

    def call(
        self, module: nn.Module, key: int, inputs: list[Any], *, train: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the stage's outputs."""
        hooks = self.offload.hooks(inputs) if self.offload is not None and train else nullcontext()
        with hooks:
            return self._call(module, key, inputs, train=train)

    def _call(
        self, module: nn.Module, key: int, inputs: list[Any], *, train: bool
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...]
        if self.recompute is not None and train:
            if not self._in_blocks:
                return self.recompute.call(module, key, *inputs)
            vars(module)["call"] = self.recompute.call
            found = module(key, *inputs)
            return found
        again = self.regather
        if again is None:
            found = module(key, *inputs)
            return found
        mesh: Any = module.mesh
        forward = ForwardGathers(module, mesh, self._blocks, mesh.blocks_ahead)
        mesh.ahead = forward if mesh.blocks_ahead else None
        try:
            if not train:
                found = module(key, *inputs)
            else:
                before = again.dropped
                self._gathers = BackwardGathers(mesh.blocks_ahead)
                with again.hooks(self._gathers, lambda: forward.block):
                    found = module(key, *inputs)
                if again.dropped == before:  # Hooks that find no parameter only cost time.
                    self.regather = None
        finally:
            mesh.ahead = None
        forward.close()
        return found

    @property
    def drops_outputs(self) -> bool:
        """Whether results that no stage of the rank reads are dropped before the backward."""
        return self.recompute is not None or self.offload is not None

    @contextmanager
    def reduce_meanwhile(self, module: nn.Module) -> Iterator[None]:
        """Reduce the gradients of sharded parameters during the backward in the context."""
        mesh: Any = module.mesh if self._blocks else None
        if mesh is None or not mesh.blocks_ahead:
            yield
            return
        mesh.scatters = late = BackwardScatters()
        try:
            yield
        finally:
            mesh.scatters = None
        late.close()

    def take_gathers(self) -> BackwardGathers | None:
        """Return the gathers for the backward of the last forward."""
        found, self._gathers = self._gathers, None
        return found


@dataclass(frozen=True)
class StageSignature:
    """A stage module and the positions of its inputs and outputs.

    user: inputs that come from the batch. gradient_inputs: inputs whose gradient is sent back.
    producers: stages that send inputs (ascending). consumers: stages that send gradients
    (descending). relayed: inputs whose partial gradient comes from a later user. loss: the output
    that is the loss. kept: outputs to return to the user. trains: whether the stage takes part in
    the backward pass. positions: of inputs that are values of other stages, by name. keeping: calls
    the module. writes_state: forward passes write parameters or buffers. step_state: those that
    each microbatch of a step writes from the value before the step.
    """

    index: int
    module: nn.Module
    arity: int
    user: tuple[tuple[int, str], ...]
    gradient_inputs: tuple[int, ...]
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    relayed: tuple[int, ...]
    loss: int | None
    kept: tuple[tuple[str, int], ...]
    trains: bool
    positions: dict[str, int]
    keeping: SavedTensorPolicy
    writes_state: bool
    step_state: StepState

    @classmethod
    def of(
        cls,
        spec: ProgramSpec,
        stage: StageSpec,
        module: nn.Module,
        found: Sequence[ValueEdge],
        keep_outputs: bool,
        recompute: Mode = "none",
        offload: bool = False,
    ) -> StageSignature:
        """Build the signature of one stage; ``found``: all links of the program."""
        names = [output.name for output in stage.outputs]
        into = [link for link in found if link.target == stage.index]
        returned = [link for link in found if link.gradient and link.back == stage.index]
        back = tuple(sorted({link.target for link in returned}, reverse=True))
        relayed = {link.name for link in returned if link.source != stage.index}
        loss = names.index(spec.loss) if spec.loss in names else None
        gradient_inputs = tuple(link.input for link in into if link.gradient)
        kept = dict.fromkeys(spec.outputs) if keep_outputs else {}
        return cls(
            stage.index,
            module,
            len(stage.inputs),
            tuple(
                (position, value.name)
                for position, value in enumerate(stage.inputs)
                if stage.sources[position] < 0
            ),
            gradient_inputs,
            tuple(sorted({link.source for link in into})),
            back,
            tuple(link.input for link in into if link.name in relayed),
            loss,
            tuple((name, names.index(name)) for name in kept if name in names),
            has_backward(spec, stage),
            {link.name: link.input for link in into},
            SavedTensorPolicy(spec, stage, module, recompute, offload),
            any(state.written for state in stage.state),
            StepState(
                getattr(module, each.attribute)
                for each in stage.state
                if each.written and each.name in spec.step_state
            ),
        )
