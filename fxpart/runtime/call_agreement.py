"""Comparison of a trainer's calls between the ranks, with what users changed since the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpart.errors import FxpartError, error
from fxpart.runtime.batch.batch_agreement import BatchAgreement, BatchSource, check_repetition
from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
from fxpart.runtime.state.module_watch import ModuleWatch
from fxpart.runtime.torch_modes import describe_process_modes
from fxpart.runtime.trainer_parts import TrainerParts
from fxpart.runtime.transport.agreement import agree


class CallAgreement:
    """Agreement of all ranks on each call of a trainer.

    watch: of the user's module, if there is one. frozen: parameters that were frozen in it since
    the trainer was created. guard: called before each batch is read; raises if a constant of the
    program has changed.
    """

    def __init__(self, parts: TrainerParts, optimizers: TrainerOptimizers) -> None:
        """parts, optimizers: of the trainer."""
        self._parts, self._optimizers = parts, optimizers
        self.watch: ModuleWatch | None = None
        self.frozen: frozenset[str] = frozenset()
        self.guard: Callable[[], int] | None = None
        self._copied = 0  # How often constants were copied from the module.

    def agree(self, call: str) -> None:
        """Check that every rank makes the same call, or raise an error on all ranks."""
        agree(
            self._parts.transport, "the trainer call",
            lambda: (True, f"{call}{self.apply_user_changes()}"),
        )  # fmt: skip
        self._forget_options()

    def read(
        self, source: BatchSource, batch: Any, mode: str, local: bool, **more: Any
    ) -> BatchAgreement:
        """Read a batch and start its comparison; mode: what it is used for.

        more: the options ``weighed`` and ``adapt`` of :class:`BatchAgreement`.
        """
        parts = self._parts
        parts.local.check_whole()
        pending = parts.accumulation.batches
        mode = f"{mode} call {parts.calls}" + (f" after {pending}" if pending else "")
        if not parts.is_alone:
            mode += describe_process_modes()
        refusal = None
        try:
            mode += self.apply_user_changes()
        except FxpartError as cause:
            refusal = cause
        read = BatchAgreement(
            parts.transport, source, batch, mode,
            local=local, request=parts.request, refusal=refusal, **more,
        )  # fmt: skip
        self._forget_options()
        return read

    def read_checked(
        self, source: BatchSource, batch: Any, mode: str, local: bool, **more: Any
    ) -> BatchAgreement:
        """Read a batch; FXP114 if rows must be repeated and the results would change."""
        read = self.read(source, batch, mode, local, **more)
        check_repetition(self._parts.transport, source, read)
        return read

    def apply_user_changes(self) -> str:
        """Apply the user's changes; return them as text for comparison between ranks.

        They are options of groups, weights of this process's parameters, and ``requires_grad`` of
        the module. Raises FXP109 and FXP113 as
        :meth:`~fxpart.runtime.state.module_watch.ModuleWatch.frozen`, and for constants that divide
        the loss.
        """
        count = 0 if self.guard is None else self.guard()
        if count != self._copied:
            self._parts.divisors.renew_here()
            self._copied = count
        text = f" constants copied {count} times" if count else ""
        if self.watch is not None:
            frozen = self.watch.frozen()
            if frozen != self.frozen:
                self._freeze(frozen)
            text += f" frozen {sorted(frozen)}" if frozen else ""
        facade = self._optimizers.facade
        if facade is None or self._parts.is_asynchronous:
            return text
        if facade.touched:
            with torch.no_grad():
                for entry in self._parts.state.entries.values():
                    if entry.trainable and len(entry.copies) > 1:
                        for copy in entry.copies.values():
                            if (first := entry.first()) is not None and copy is not first:
                                copy.copy_(first)
            self._parts.note_written()
        facade.apply()
        text += facade.changed
        return text

    def _forget_options(self) -> None:
        """Note that the ranks have compared the options that users set."""
        if self._optimizers.facade is not None:
            self._optimizers.facade.changed = ""

    def _freeze(self, frozen: frozenset[str]) -> None:
        """Freeze parameters as in the user's module, or train them again."""
        if self._parts.is_asynchronous or self._parts.accumulation.batches:
            raise error(
                "FXP109",
                where=f"parameter {min(frozen ^ self.frozen)}",
                why="its requires_grad was changed while minibatches were in flight"
                if self._parts.is_asynchronous
                else "its requires_grad was changed between a backward and its update",
                fix="change it after an update of a synchronous trainer, or compile again",
            )
        self.frozen = frozen
