"""Access to a trainer's state by name: parameters, buffers, optimizer state, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fxpart.compat import plain_name, replaced_names
from fxpart.errors import error
from fxpart.runtime.gradients.communication import gather_gradients
from fxpart.runtime.gradients.stage_replicas import reduce_gradients_temporarily
from fxpart.runtime.optimizer.optimizer_state import (
    gather_optimizer_state,
    merge_optimizers,
    plan_state_load,
    rename_optimizer_state,
)
from fxpart.runtime.state.dtensor_state import has_dtensors
from fxpart.runtime.state.safetensors_export import save_pretrained
from fxpart.runtime.trainer_base import TrainerBase
from fxpart.runtime.transport.agreement import agree, convert_transport_errors


class StatefulTrainer(TrainerBase):
    """State access by original names; every rank must make each call.

    model_config: the text of a transformers model's
    config.json, for ``save_pretrained``. plan_text, fingerprint: the plan as JSON, and the
    fingerprint of the model's graph, for checkpoints; empty if the trainer was not created from a
    plan. reload_unused: copies loaded state that only evaluation reads to its stages.
    """

    model_config = ""
    plan_text = ""
    fingerprint = ""
    reload_unused: Callable[[], None] | None = None

    def state_dict(
        self, *, first_only: bool = False, sharded: bool = False, trainable_only: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return whole copies of parameters and persistent buffers by original name and alias.

        first_only: only rank 0 receives them, others an empty dict. sharded: return DTensors of
        this rank's own stage instead, without gathering (for torch.distributed.checkpoint).
        trainable_only: only parameters with gradients, such as the adapters of a frozen model (load
        them with ``load_state_dict(..., strict=False)``). Every rank must call it, unless each has
        the whole model and neither ``first_only`` nor ``sharded`` is set.
        """
        self.pipeline.settle()
        if self._has_whole_model and not first_only and not sharded:
            return self._note_returned(self._own_state_dict(trainable_only))
        self.agreement.agree(f"state_dict {first_only} {sharded} {trainable_only}")
        wanted = {n: e for n, e in self.parts.state.saved() if e.trainable or not trainable_only}
        found: dict[str, torch.Tensor]
        if sharded:
            found = {n: t for n, t in self.parts.sharded_state.give().items() if n in wanted}
        else:
            own = {name: entry.owned() for name, entry in wanted.items()}
            with convert_transport_errors(self.transport, "gathering state"):
                found = self.parts.state.gather(own, first_only=first_only)
        if sharded or not first_only or 0 in self.transport.local:
            self._add_unused_and_aliases(found, unused=not trainable_only)
        return self._note_returned(found)

    def _note_returned(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state, and record it for the module watch, as it may be loaded into the
        module. Leave out names that the model does not have.
        """
        if self.agreement.watch is not None:
            self.agreement.watch.note_returned(found)
        return {self._original_names.get(name, name): t for name, t in found.items()}

    @cached_property
    def _original_names(self) -> dict[str, str]:
        """The model's own names of tensors whose names a graph cannot have."""
        return replaced_names(self.spec.aliases)

    @cached_property
    def _has_whole_model(self) -> bool:
        """Whether every rank has all parameters and buffers whole and current between two calls."""
        every = set(range(self.transport.ranks))
        sharding = self.spec.sharding
        return (
            not self.is_asynchronous
            and (sharding is None or not sharding.zero)
            and all(
                len(entry.pieces.sources) == 1
                and {rank for stage in entry.stages for rank in self.parts.ranks[stage]} == every
                for _, entry in self.parts.state.saved()
            )
        )

    def is_collective(self, name: str) -> bool:
        """Return whether every rank has to make the call."""
        return name != "state_dict" or not self._has_whole_model

    def _own_state_dict(self, trainable_only: bool) -> dict[str, torch.Tensor]:
        """Return copies of this rank's state, which is the whole model."""
        found = {
            name: next(iter(entry.copies.values())).detach().clone().contiguous()
            for name, entry in self.parts.state.saved()
            if entry.trainable or not trainable_only
        }
        self._add_unused_and_aliases(found, unused=not trainable_only)
        return found

    def _add_unused_and_aliases(self, found: dict[str, torch.Tensor], *, unused: bool) -> None:
        """Add state that no stage needs, and the other names of tied parameters."""
        if unused:
            found.update({name: t.detach().clone() for name, t in self.parts.unused.items()})
        found.update({a: found[m] for a, m in self.spec.aliases.items() if m in found})

    def ema_state_dict(self, *, first_only: bool = False) -> dict[str, torch.Tensor]:
        """Return the moving average of the weights (``ema=``) by original name, and all buffers.

        Frozen parameters and buffers are the present ones. Each rank averages its own parts, and
        only this call gathers them; every rank must make it. first_only: only rank 0 receives
        them, others an empty dict. FXP109 without ``ema=``.
        """
        average = self.average
        if average is None:
            raise error(
                "FXP109",
                where="ema_state_dict()",
                why="the trainer was created without a moving average of the weights",
                fix="pass its decay: program.trainer(..., ema=0.999)",
            )
        self.pipeline.settle()
        self.agreement.agree(f"ema_state_dict {first_only}")
        saved = dict(self.parts.state.saved())
        fixed = {name: entry.owned() for name, entry in saved.items() if not entry.trainable}
        with convert_transport_errors(self.transport, "gathering state"):
            found = self.parts.state.gather(fixed, first_only=first_only)
            found |= average.gather(first_only=first_only)
        if first_only and 0 not in self.transport.local:
            return {}
        ordered = {name: found[name] for name in saved}
        self._add_unused_and_aliases(ordered, unused=True)
        return {self._original_names.get(name, name): t for name, t in ordered.items()}

    def save_pretrained(
        self, directory: str | Path, *, shard_bytes: int = 5_000_000_000
    ) -> tuple[Path, ...]:
        """Write the weights as a Hugging Face safetensors checkpoint; return the files.

        ``from_pretrained`` of the model's class reads the folder: names are the model's own, and a
        tied parameter is stored once, under its main name. shard_bytes: maximum bytes of a file;
        larger checkpoints are split into several files with an index. Rank 0 receives one tensor at
        a time, so no rank needs memory for the whole model. The folder is replaced atomically;
        files in it that are not weights are kept. Every rank must call it. FXP603 on every rank if
        it cannot be written.
        """
        self.pipeline.settle()
        self.agreement.agree("save_pretrained")
        return save_pretrained(
            self.parts.state,
            self.parts.unused,
            directory,
            names=self._original_names,
            config=self.model_config,
            shard_bytes=shard_bytes,
        )

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Load parameters and buffers by original name; FXP110 on every rank if they do not match.

        state: whole tensors, of which each rank copies its part; or, as from
        ``state_dict(sharded=True)``, DTensors of any sharding. Names of a compiled module
        ("_orig_mod") are accepted.
        """
        self.pipeline.settle()
        state = {plain_name(name): tensor for name, tensor in state.items()}
        unused = {
            *self.parts.unused,
            *(a for a, m in self.spec.aliases.items() if m in self.parts.unused),
        }
        inner = {n: t for n, t in state.items() if n not in unused}
        text = "parts" if has_dtensors(inner) else " ".join(sorted(state))

        def load() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], str]:
            found = self.parts.state.find_unused(self.parts.unused, state, strict=strict)
            self.parts.state.load(inner, strict=strict)
            return found, text

        for tensor, given in agree(self.transport, "the state dict", load):
            tensor.copy_(given)
        self.parts.note_written()
        if self.agreement.watch is not None:
            self.agreement.watch.accept()
        self.note_loaded()

    def note_loaded(self) -> None:
        """Renew copies of the state after a load."""
        self.parts.divisors.renew()
        if self.reload_unused is not None:
            self.reload_unused()

    def optimizer_state_dict(
        self, *, first_only: bool = False, numbered: bool = False
    ) -> dict[str, Any]:
        """Return ``{"state": {name: {...}}, "param_groups": [...]}`` by original parameter name.

        first_only: only rank 0 receives it, others an empty dict. numbered: by numbers of
        parameters, as the ``state_dict()`` of the user's optimizer instance, which can load it;
        FXP109 if the trainer was created without an instance.
        """
        assert self.optimizer is not None, "there is no optimizer"
        self.pipeline.settle()
        user = self.optimizers.user
        if numbered and user is None:
            raise error(
                "FXP109",
                where="optimizer_state_dict(numbered=True)",
                why="the trainer was not created with an optimizer instance, so its parameters "
                "have no numbers",
                fix="leave out numbered=, or pass an instance to program.trainer()",
            )
        self.agreement.agree(f"optimizer_state_dict {first_only}")
        with convert_transport_errors(self.transport, "gathering optimizer state"):
            found = self._gather_optimizer_state(first_only)
        if numbered and user is not None and found:
            return user.number_state(found, self.spec.aliases)
        return rename_optimizer_state(found, self._original_names)

    def _gather_optimizer_state(self, first_only: bool) -> dict[str, Any]:
        """Return the optimizer state of all ranks by original parameter name."""
        optimizers = merge_optimizers(self.optimizers.by_place)
        return gather_optimizer_state(
            self.parts.state, self.parts.shards, optimizers, first_only=first_only
        )

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`optimizer_state_dict`, also of another number of ranks."""
        assert self.optimizer is not None, "there is no optimizer"
        self.pipeline.settle()
        state = rename_optimizer_state(state, {a: m for m, a in self._original_names.items()})

        def plan() -> tuple[list[Callable[[], None]], str]:
            found = [
                plan_state_load(
                    self.parts.state, self.parts.shards, each, state, self.optimizers.groups
                )
                for each in self.optimizers.by_place.values()
            ]
            return found, " ".join(sorted(state["state"]))

        for load in agree(self.transport, "the optimizer state", plan):
            load()
        self.pipeline.reload_options()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients by original name on every rank: accumulated, or of the last update.

        Accumulated gradients are sums over batches, each weighted by its weight divided by the
        first batch's weight (see :meth:`Trainer.backward`); an update divides them by the sum of
        these weights. FXP109 if stages update on their own, and clear their gradients.
        """
        if self.is_asynchronous:
            raise error(
                "FXP109", where="gradients()",
                why="each stage clears its gradients after its own update",
                fix="use a synchronous trainer",
            )  # fmt: skip
        self.agreement.agree("gradients")
        is_reduced = self.parts.accumulation.is_reduced
        whole = (
            nullcontext()
            if is_reduced
            else reduce_gradients_temporarily(self.parts.state, self.parts.shards)
        )
        with convert_transport_errors(self.transport, "gathering gradients"), whole:
            rows = {} if is_reduced else self.parts.shards.rows.sums()
            own = self.parts.run_on_mesh_ranks(
                partial(self.parts.shards.current, summed=is_reduced, rows=rows)
            )
            found = gather_gradients(self.parts.state, self.parts.shards, own)
        return {self._original_names.get(name, name): value for name, value in found.items()}
