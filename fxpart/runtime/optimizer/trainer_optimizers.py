"""The optimizers of a trainer in this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch

from fxpart.compat import replaced_names
from fxpart.plan.offload import offloads_optimizer
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.asynchronous.stage_optimizers import (
    collect_stage_parameters,
    make_stage_optimizers,
)
from fxpart.runtime.embedding_tables import check_optimizer_support
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
from fxpart.runtime.optimizer.parameter_groups import Groups, ParameterGroup, make_local_groups
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.optimizer.weight_average import WeightAverage
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.trainer_parts import TrainerParts
from fxpart.runtime.transport.agreement import agree


class TrainerOptimizers:
    """The optimizers of a trainer's parameters in this process, with the same groups on every rank.

    by_place: those that update the weights, by the first stage and mesh rank of each. Stages that
    update on their own have one each; otherwise one has all parameters of a rank. groups: the
    parameter groups. user: the instance that the user passed. facade: represents them for
    schedulers and users; None if there are none. average: the moving average of the weights.
    """

    def __init__(self, parts: TrainerParts, given: Any, groups: Groups | None) -> None:
        """Create the optimizers, check that they can be divided, and copy the user's state.

        given, groups: see :class:`~fxpart.runtime.trainer_base.TrainerBase`.
        """
        self._parts, self._state, self._shards = parts, parts.state, parts.shards
        self.by_place: Mapping[Place, torch.optim.Optimizer] = {}
        self.groups: tuple[ParameterGroup, ...] = ()
        self.user = given if isinstance(given, UserOptimizer) else None
        self.facade: OptimizerFacade | None = None
        self.average: WeightAverage | None = None
        if given is not None:
            self._create(given, groups)
            self._divide()
            if self.user is not None:
                self.user.fill(self._state, self._shards, self.by_place.values())
            self.facade = self._make_facade()
        if parts.options.ema is not None:
            self.average = WeightAverage(self._state, self._shards, parts.options.ema)

    def drop(self, lost: Collection[int]) -> None:
        """Forget the optimizers of stages whose process has ended."""
        self.by_place = {k: each for k, each in self.by_place.items() if k[0] not in lost}

    def _create(self, given: Any, groups: Groups | None) -> None:
        kind, asynchronous = self._parts.options.kind, self._parts.is_asynchronous

        def make() -> tuple[Mapping[Place, torch.optim.Optimizer], str]:
            self.groups = make_parameter_groups(
                given, groups, self._state.trainable(), replaced_names(self._state.aliases)
            )
            made: Mapping[Place, torch.optim.Optimizer]
            if asynchronous:
                owned = kind == "asynchronous"
                made = make_stage_optimizers(
                    given, self._state, self.groups, self._shards, owned=owned
                )
            else:
                mine = self._state.parameters()
                own_groups = make_local_groups(self.groups, mine)
                names = [name for name, _ in mine]
                made = {(0, 0): make_optimizer(given, [p for _, p in mine], own_groups, names)}
                check_optimizer_support(made[0, 0], self._state, self._shards.rows)
            if not self.groups:
                stages = collect_stage_parameters(self._state, owned=kind != "queue").values()
                own = chain.from_iterable(stages) if asynchronous else mine
                check_selection(given, self._state.make_whole_parameters(), own, made.values())
            text = " ".join(",".join(group.names) for group in self.groups)
            return made, f"{describe_groups(next(iter(made.values())))} {text}"

        self.by_place = agree(self._parts.transport, "the optimizer's parameter groups", make)
        if not asynchronous and self.user is None:
            use_fused_kernels(self.by_place[0, 0])  # Weight prediction reads step counts.

    def _divide(self) -> None:
        """Divide the optimizers between the ranks of this process; FXP115 if that changes them."""
        parts, user, asynchronous = self._parts, self.user, self._parts.is_asynchronous
        division = get_optimizer_division(self._state, self._shards, by_stage=asynchronous)
        names = {id(p): name for name, p in self._state.parameters()}

        def check() -> tuple[bool, str]:
            each = self.by_place.values()
            for one in () if asynchronous else each:
                check_step_hooks(one, division)
            apart = [check_division(one, division, names) for one in each]
            return all(apart), "" if user is None or parts.is_alone else user.describe()

        apart = agree(parts.transport, "the optimizer", check)
        if asynchronous:
            return
        if not apart and division.copies:
            (made,) = self.by_place.values()
            self.by_place = self._split_by_rank(made)
        for each in self.by_place.values():
            self._shards.install(each)
        if offloads_optimizer(parts.options.offload):
            self._shards.move_to_host(list(self.by_place.values()))

    def _make_facade(self) -> OptimizerFacade:
        optimizers, withheld = list(self.by_place.values()), self._explain_withheld()
        if not self._parts.is_asynchronous:
            return OptimizerFacade(
                optimizers, self._list_group_parameters(), self.user,
                withheld=withheld, final=self._parts.transport.ranks == 1,
            )  # fmt: skip
        members = [
            [p for each in optimizers for p in each.param_groups[index]["params"]]
            for index in range(len(optimizers[0].param_groups))
        ]
        return StageOptimizerFacade(optimizers, members, self.user, withheld=withheld, final=True)

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
            {id(p) for each in self.by_place.values() for p in each.param_groups[index]["params"]}
            for index in range(len(next(iter(self.by_place.values())).param_groups))
        ]
        found: list[list[torch.Tensor]] = [[] for _ in groups]
        for entry in self._state.entries.values():
            first = entry.first() if entry.trainable else None
            for ids, mine in zip(groups, found, strict=True):
                if first is not None and id(self._shards.updated(first)) in ids:
                    mine.append(first)
        return found

    def _explain_withheld(self) -> str:
        """Return why users may not read the optimizer's parameters, "" if they may."""
        cut = [n for n, e in self._state.entries.items() if e.trainable and e.pieces.is_cut]
        if not cut:
            return ""
        shown = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        return f"a rank has only a part of {shown}, which users would not expect"
