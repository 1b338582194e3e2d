"""The optimizers of a trainer, and what users change between two batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from fxpart.compat import replaced_names
from fxpart.errors import error
from fxpart.plan.offload import offloads_optimizer
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.asynchronous.stage_optimizers import (
    collect_stage_parameters,
    make_stage_optimizers,
)
from fxpart.runtime.batch.loss_divisors import LossDivisors
from fxpart.runtime.embedding_tables import check_optimizer_support
from fxpart.runtime.entry_point import EntryPoints
from fxpart.runtime.gradients.reducer import GradientAccumulation
from fxpart.runtime.optimizer.division_check import (
    check_division,
    check_step_hooks,
    get_optimizer_division,
    split_optimizer,
)
from fxpart.runtime.optimizer.facade import OptimizerFacade
from fxpart.runtime.optimizer.factory import (
    check_selection,
    describe_groups,
    make_optimizer,
    make_parameter_groups,
    use_fused_kernels,
)
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.parameter_groups import Groups, ParameterGroup, make_local_groups
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.state.model_state import ModelState, Place
from fxpart.runtime.state.module_watch import ModuleWatch
from fxpart.runtime.trainer_options import Kind, TrainerOptions
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.transport.interface import Transport


class OptimizerOwner(EntryPoints):
    """A trainer's optimizers.

    optimizer: represents this process's optimizers for schedulers and users
    (:class:`~fxpart.runtime.optimizer.facade.OptimizerFacade`). optimizers: those that update the
    weights, by the first stage and mesh rank of each. watch: of the user's module, if there is one.
    frozen: parameters that were frozen in it since the trainer was created. guard: called before
    each batch is read; raises if a constant of the program has changed. divisors: buffers whose
    sums divide losses.
    """

    options: TrainerOptions
    optimizer: OptimizerFacade | None = None
    optimizers: Mapping[Place, torch.optim.Optimizer] = {}
    watch: ModuleWatch | None = None
    frozen: frozenset[str] = frozenset()
    guard: Callable[[], int] | None = None
    divisors: LossDivisors
    _state: ModelState
    _shards: OptimizerShards
    _transport: Transport
    _groups: tuple[ParameterGroup, ...]

    @property
    def kind(self) -> Kind:
        """How the minibatches run."""
        return self.options.kind

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update on their own."""
        return self.kind != "synchronous"

    @abstractmethod
    def step_by_hand(self) -> None:
        """Update for ``optimizer.step()``; FXP115 if that is impossible."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear all gradients."""

    @abstractmethod
    def touch(self) -> None:
        """Note that parameters are accessed through the optimizer."""

    def _make_optimizer(self, given: Any, groups: Groups | None) -> None:
        """Create the optimizers of this process, with the same groups on every rank.

        Stages that update on their own have one each; otherwise one has all parameters.
        """

        def make() -> tuple[Mapping[Place, torch.optim.Optimizer], str]:
            self._groups = make_parameter_groups(
                given, groups, self._state.trainable(), replaced_names(self._state.aliases)
            )
            made: Mapping[Place, torch.optim.Optimizer]
            if self.is_asynchronous:
                owned = self.kind == "asynchronous"
                made = make_stage_optimizers(
                    given, self._state, self._groups, self._shards, owned=owned
                )
            else:
                mine = self._state.parameters()
                own_groups = make_local_groups(self._groups, mine)
                names = [name for name, _ in mine]
                made = {(0, 0): make_optimizer(given, [p for _, p in mine], own_groups, names)}
                check_optimizer_support(made[0, 0], self._state, self._shards.rows)
            if not self._groups:
                stages = collect_stage_parameters(self._state, owned=self.kind != "queue").values()
                own = chain.from_iterable(stages) if self.is_asynchronous else mine
                check_selection(given, self._state.make_whole_parameters(), own, made.values())
            text = " ".join(",".join(group.names) for group in self._groups)
            return made, f"{describe_groups(next(iter(made.values())))} {text}"

        self.optimizers = agree(self._transport, "the optimizer's parameter groups", make)
        if not self.is_asynchronous and not isinstance(given, UserOptimizer):
            use_fused_kernels(self.optimizers[0, 0])  # Weight prediction reads step counts.

    def _prepare_optimizers(self, given: Any, groups: Groups | None) -> None:
        """Create the optimizers, check that they can be divided, and copy the user's state."""
        self._accumulation = GradientAccumulation()  # Batches since the last update.
        self._copied = 0  # How often constants were copied from the module.
        self._groups = ()
        self._user_optimizer: UserOptimizer | None = None
        if given is None:
            return
        self._make_optimizer(given, groups)
        state, alone = self._state, len(self._transport.local) == self._transport.ranks
        division = get_optimizer_division(state, self._shards, by_stage=self.is_asynchronous)
        names = {id(p): name for name, p in state.parameters()}
        user = self._user_optimizer = given if isinstance(given, UserOptimizer) else None

        def check() -> tuple[bool, str]:
            each = self.optimizers.values()
            for one in () if self.is_asynchronous else each:
                check_step_hooks(one, division)
            apart = [check_division(one, division, names) for one in each]
            return all(apart), "" if user is None or alone else user.describe()

        apart = agree(self._transport, "the optimizer", check)
        if not apart and division.copies and not self.is_asynchronous:
            (made,) = self.optimizers.values()
            self.optimizers = self._split_by_rank(made)
        if not self.is_asynchronous:
            for each in self.optimizers.values():
                self._shards.install(each)
            if offloads_optimizer(self.options.offload):
                self._shards.move_to_host(list(self.optimizers.values()))
        if user is not None:
            user.fill(state, self._shards, self.optimizers.values())
        self.optimizer = self._make_facade(user)

    def _make_facade(self, user: UserOptimizer | None) -> OptimizerFacade:
        """Create the facade of the optimizers; user: the user's instance."""
        optimizers = list(self.optimizers.values())
        if not self.is_asynchronous:
            return OptimizerFacade(
                self, optimizers, self._list_group_parameters(), user,
                withheld=self._withheld(), final=self._transport.ranks == 1,
            )  # fmt: skip
        members = [
            [p for each in optimizers for p in each.param_groups[index]["params"]]
            for index in range(len(optimizers[0].param_groups))
        ]
        return StageOptimizerFacade(
            self, optimizers, members, user, withheld=self._withheld(), final=True
        )

    def _split_by_rank(self, made: torch.optim.Optimizer) -> dict[Place, torch.optim.Optimizer]:
        """Create one optimizer for each rank of this process, as under torchrun."""
        sets: dict[int, list[torch.Tensor]] = {}
        places: dict[int, Place] = {}
        for entry in self._state.entries.values():
            for (stage, mesh_rank), tensor in entry.copies.items() if entry.trainable else ():
                rank = self._state.rank(stage, mesh_rank)
                places.setdefault(rank, (stage, mesh_rank))
                sets.setdefault(rank, []).append(tensor)
        return dict(
            zip((places[r] for r in sets), split_optimizer(made, list(sets.values())), strict=True)
        )

    def _list_group_parameters(self) -> list[list[torch.Tensor]]:
        """Return by group the parameters of this process, each name once, in the model's order."""
        groups = [
            {id(p) for each in self.optimizers.values() for p in each.param_groups[index]["params"]}
            for index in range(len(next(iter(self.optimizers.values())).param_groups))
        ]
        found: list[list[torch.Tensor]] = [[] for _ in groups]
        for entry in self._state.entries.values():
            first = entry.first() if entry.trainable else None
            for ids, mine in zip(groups, found, strict=True):
                if first is not None and id(self._shards.updated(first)) in ids:
                    mine.append(first)
        return found

    def _withheld(self) -> str:
        """Return why users may not read the optimizer's parameters, "" if they may."""
        cut = [n for n, e in self._state.entries.items() if e.trainable and e.pieces.is_cut]
        if not cut:
            return ""
        shown = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        return f"a rank has only a part of {shown}, which users would not expect"

    def _apply_user_changes(self) -> str:
        """Apply the user's changes; return them as text for comparison between ranks.

        They are options of groups, weights of this process's parameters, and ``requires_grad`` of
        the module. Raises FXP109 and FXP113 as
        :meth:`~fxpart.runtime.state.module_watch.ModuleWatch.frozen`, and for constants that divide
        the loss.
        """
        count = 0 if self.guard is None else self.guard()
        if count != self._copied:
            self.divisors.renew_here()
            self._copied = count
        text = f" constants copied {count} times" if count else ""
        if self.watch is not None:
            frozen = self.watch.frozen()
            if frozen != self.frozen:
                self._freeze(frozen)
            text += f" frozen {sorted(frozen)}" if frozen else ""
        facade = self.optimizer
        if facade is None or self.is_asynchronous:
            return text
        if facade.touched:
            with torch.no_grad():
                for entry in self._state.entries.values():
                    if entry.trainable and len(entry.copies) > 1:
                        for copy in entry.copies.values():
                            if (first := entry.first()) is not None and copy is not first:
                                copy.copy_(first)
            self._note_written()
        facade.apply()
        text += facade.changed
        return text

    def _note_written(self) -> None:
        """Note that parameters were written by others than the optimizers."""
        if self._shards.host is not None:
            self._shards.host.note_written()

    def _freeze(self, frozen: frozenset[str]) -> None:
        """Freeze parameters as in the user's module, or train them again."""
        if self.is_asynchronous or self._accumulation.batches:
            raise error(
                "FXP109",
                where=f"parameter {min(frozen ^ self.frozen)}",
                why="its requires_grad was changed while minibatches were in flight"
                if self.is_asynchronous
                else "its requires_grad was changed between a backward and its update",
                fix="change it after an update of a synchronous trainer, or compile again",
            )
        self.frozen = frozen
