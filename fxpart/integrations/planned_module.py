"""A module that other tools train by a plan: compiled from the first batch, then run by a trainer.

The tools own the loop, the optimizer instance and its scheduler. :class:`PlannedModule` has the
program and the trainer, and copies weights and optimizer state back where a tool reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpart.api import Program
from fxpart.api import compile as compile_program
from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.trainer import Trainer

_OWN_ARGUMENTS = ("model", "example_inputs", "example_kwargs", "optimizer")


def check_compile_options(
    given: Mapping[str, Any], where: str, known: tuple[str, ...] = ()
) -> None:
    """Raise FXP109 for options that ``fxpart.compile`` does not have, or that the tool passes.

    known: further names to suggest, those of the tool.
    """
    names = [n for n in inspect.signature(compile_program).parameters if n not in _OWN_ARGUMENTS]
    wrong = [name for name in given if name not in names]
    if wrong:
        fix = f"use one of {', '.join([*known, *names])}"
        raise FxpartError(
            Problem("FXP109", f"{where}({name}=)", "there is no such argument", fix)
            for name in wrong
        )


class PlannedModule:
    """A module, the program of its plan, and the trainer of this process.

    program: None before the first batch. trainer: None before the first batch and after
    :meth:`release`.
    """

    def __init__(
        self,
        module: nn.Module,
        compile_options: Mapping[str, Any],
        trainer_options: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """compile_options: of ``fxpart.compile``. trainer_options: of ``program.trainer``, read
        when a trainer is created.
        """
        self.module = module
        self.program: Program | None = None
        self.trainer: Trainer | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.calls = 0
        self._compile_options = dict(compile_options)
        self._items = 0
        self._trainer_options = trainer_options

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None, calls: int = 0) -> None:
        """Train with this instance from the next batch on, from the module's present weights.

        calls: training batches before, which the keys of random ops depend on.
        """
        self.release()
        self.optimizer, self.calls = optimizer, calls

    def backward(self, batch: Any, weight: float | None = None) -> torch.Tensor:
        """Add the batch's gradients; return its loss. weight: in the mean of an update."""
        return self._prepare(batch).backward(batch, weight=weight)

    def eval_step(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode."""
        return self._prepare(batch).eval_step(batch)

    def predict_with_loss(self, batch: Any) -> tuple[torch.Tensor | None, Any]:
        """Return loss and outputs of a batch in evaluation mode."""
        return self._prepare(batch).predict_with_loss(batch)

    def predict(self, batch: Any) -> Any:
        """Return the outputs of a batch, which may have no targets, in evaluation mode."""
        return self._prepare(batch).predict(batch)

    def get_calls(self) -> int:
        """Return the number of training batches."""
        return self.calls if self.trainer is None else self.trainer.calls

    def has_targets(self, batch: Any) -> bool:
        """Return whether a batch has as many items as the one that was compiled."""
        return len(batch) == self._items

    def update(self, total: float | None = None) -> None:
        """Update with the accumulated gradients; arguments as for ``trainer.update``."""
        if self.trainer is not None:
            self.trainer.update(total=total)

    def clip_gradients(self, norm: float | None = None, value: float | None = None) -> None:
        """Clip the gradients of the next updates by their norm or value; None does not clip."""
        if self.trainer is not None:
            self.trainer.parts.options = replace(
                self.trainer.options, clip_norm=norm, clip_value=value
            )

    def write_weights(self, *, first_only: bool = False, trainable_only: bool = False) -> None:
        """Write the trained weights into the module; collective.

        first_only: only on rank 0. trainable_only: leave buffers and frozen parameters.
        """
        if self.trainer is None:
            return
        state = self.trainer.state_dict(first_only=first_only, trainable_only=trainable_only)
        if state:
            self.module.load_state_dict(state, strict=False)

    def read_weights(self) -> None:
        """Take over the module's weights, which were changed since the trainer was created."""
        if self.trainer is not None:
            self.trainer.load_state_dict(self.module.state_dict(), strict=False)

    def optimizer_state_dict(self, *, first_only: bool = False) -> dict[str, Any]:
        """Return the state as the optimizer instance's own ``state_dict()`` has it; collective.

        first_only: only on rank 0; others get an empty dict.
        """
        assert self.optimizer is not None, "there is no optimizer"
        if self.trainer is None:
            return self.optimizer.state_dict()
        return self.trainer.optimizer_state_dict(first_only=first_only, numbered=True)

    def release(self) -> None:
        """Write weights and optimizer state back and close the trainer; collective."""
        if self.trainer is None:
            return
        self.write_weights()
        optimizer = self.optimizer
        state = None if optimizer is None else self.optimizer_state_dict()
        self.calls = self.trainer.calls
        self.trainer.close()
        self.trainer = None
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)

    def _prepare(self, batch: Any) -> Trainer:
        """Return the trainer; compile and create it for the first batch."""
        if self.trainer is not None:
            return self.trainer
        given = "sgd" if self.optimizer is None else self.optimizer
        if self.program is None:
            self._items = len(batch)
            modes = {m: m.training for m in self.module.modules()}
            if not self.module.training:
                self.module.train()  # A tool evaluates first; the program is that of training.
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                self.program = compile_program(
                    self.module,
                    example_inputs=dict(batch) if isinstance(batch, Mapping) else batch,
                    optimizer=given,
                    **self._compile_options,
                )
            for each, mode in modes.items():
                each.training = mode
        made = self.program.trainer(given, **self._trainer_options())
        if type(made) is not Trainer:
            made.close()
            raise error(
                "FXP109",
                where=f"plan of schedule {self.program.plan.schedule}",
                why="an asynchronous or queue plan updates its weights by itself, and the tool "
                "that owns the loop cannot decide when",
                fix='use a synchronous plan (mode="sync"), or program.trainer(...).fit',
            )
        made.calls = self.calls
        self.trainer = made
        return made
