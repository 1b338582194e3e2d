"""Rehearse the plans that may be the best, until the best of all that are known has been run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fxpart.deciding import decide
from fxpart.errors import FxpartError
from fxpart.exact import Parts
from fxpart.front import Front
from fxpart.measuring.rehearsals import Rehearsals
from fxpart.optimizers import choose
from fxpart.plan import Plan
from fxpart.planned.decided import plan_key
from fxpart.profile import Rehearsal
from fxpart.reranking import Stages

if TYPE_CHECKING:
    from fxpart.costs import CostModel

REACH = 1.25  # how much longer than the best a plan may be thought to take, and be rehearsed
_CLOSE = 1.1  # how much longer than the fastest a plan took that is run again
_TURNS = 3  # of the closest
_EACH = 4  # plans that are rehearsed before it is asked again which may be the best
_STEPS = (5, 11)  # that count: at least, and at most
_LENGTH = 1.5  # seconds of steps that count, about


@dataclass(frozen=True)
class Asking:
    """What :func:`rehearse` needs of a profiling session.

    front, microbatches: what is planned. model: the profile as it is now. keep: puts a rehearsal
    into it. left: seconds of the budget. told: how many plans have been run.
    """

    front: Front
    microbatches: int | None
    model: Callable[[], CostModel]
    keep: Callable[[str, Rehearsal], None]
    left: Callable[[], float]
    told: Callable[[int], None]


@dataclass(frozen=True)
class Rehearsed:
    """What came of it. plan: the best by all that is known. left_out: why not all were run."""

    plan: Plan
    done: int
    known: int
    left_out: tuple[str, ...] = ()


def rehearse(asking: Asking, threads: int) -> Rehearsed:
    """Rehearse, with real ranks on this host, the plans that compiling compares with this profile.

    Those that may take up to a quarter longer than the fastest are run, the best first. What they
    take may change which are the best, so it is asked again, until all of them are known or the
    budget is used. Those within a tenth of the fastest are run in up to three turns, while there is
    time. threads: of computation of each rank.
    """
    ranks = len(asking.front.request.cluster.devices)
    return _Contest(asking, ranks, threads).held()


@dataclass
class _Contest:
    """How far it is. done: plans run; failed: those that could not be, by their decisions."""

    asking: Asking
    ranks: int
    threads: int
    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def held(self) -> Rehearsed:
        """Run plans until those that may be best are known. What fails is left out, and told."""
        before: int | None = None
        stage = Rehearsals(self.ranks, threads=self.threads)
        try:
            while True:
                best, looked = _looked(self.asking)
                if before is None:
                    before = sum(p.prediction.rehearsed_seconds > 0 for p, _ in looked.values())
                able = {k: made for k, made in looked.items() if k not in self.failed}
                fresh = _wanted(able)
                wanted = fresh or self._close(able)
                if not wanted or self.asking.left() <= 0:
                    rest = [f"rehearsing {len(fresh)} plans"] if fresh else []
                    return Rehearsed(best, self.done, before, (*self.failed.values(), *rest))
                if not self._some(stage, wanted[:_EACH]):
                    stage.close()  # its processes may have ended
                    stage = Rehearsals(self.ranks, threads=self.threads)
        finally:
            stage.close()

    def _some(self, stage: Rehearsals, wanted: Sequence[tuple[Plan, Parts]]) -> bool:
        """Run these while there is time; False where one of them failed."""
        for plan, parts in wanted:
            if self.asking.left() <= 0:
                break
            self.asking.told(self.done)
            try:
                found = stage.run(plan, parts, steps=_steps(plan), label=words(plan))
            except FxpartError as why:
                last = why.problems[0].why.splitlines()[-1]
                self.failed[plan_key(plan)] = f"rehearsing {words(plan)}: {last}"
                return False
            before = self._known(plan)
            self.asking.keep(plan_key(plan), before.joined(found) if before else found)
            self.done += not before
        return True

    def _close(self, looked: dict[str, tuple[Plan, Parts]]) -> list[tuple[Plan, Parts]]:
        """Those so close to the fastest that a disturbance may have decided, for another turn."""
        ordered = sorted(looked.values(), key=lambda made: made[0].prediction.expected_seconds)
        limit = _CLOSE * ordered[0][0].prediction.expected_seconds if ordered else 0.0
        near = [made for made in ordered if 0 < made[0].prediction.rehearsed_seconds <= limit]
        known = [self._known(plan) for plan, _ in near]
        turns = min((one.turns for one in known if one), default=_TURNS)
        if len(near) < 2 or turns >= _TURNS:
            return []
        return [made for made, one in zip(near, known, strict=True) if one and one.turns <= turns]

    def _known(self, plan: Plan) -> Rehearsal | None:
        """What the profile holds of the plan."""
        model = self.asking.model()
        return model.rehearsal(plan_key(plan)) if isinstance(model, Stages) else None


def _looked(asking: Asking) -> tuple[Plan, dict[str, tuple[Plan, Parts]]]:
    """The best plan by the profile as it is, and all that were compared, by their decisions."""
    found: dict[str, tuple[Plan, Parts]] = {}

    def look(plan: Plan, parts: Parts) -> None:
        found[plan_key(plan)] = (plan, parts)

    front = asking.front
    front = replace(front, request=replace(front.request, cost_model=asking.model()))
    decided = decide(front, asking.microbatches, looked=look)
    found.setdefault(plan_key(decided.plan), (decided.plan, decided.parts))
    return decided.plan, found


def _wanted(looked: dict[str, tuple[Plan, Parts]]) -> list[tuple[Plan, Parts]]:
    """Those that may be the best and have not been run, the best first."""
    ordered = sorted(looked.values(), key=lambda made: made[0].prediction.expected_seconds)
    limit = REACH * ordered[0][0].prediction.expected_seconds
    return [
        (plan, parts)
        for plan, parts in ordered
        if not plan.prediction.rehearsed_seconds and plan.prediction.expected_seconds <= limit
    ]


def _steps(plan: Plan) -> int:
    """So many that they take about a second and a half."""
    least, most = _STEPS
    seconds = max(1e-6, plan.prediction.expected_seconds)
    return int(min(most, max(least, _LENGTH / seconds)))


def words(plan: Plan) -> str:
    """A plan in words: "dp=2, 1 stage, 4 microbatches"."""
    first = plan.stages[0]
    axes = (("dp", first.data_parallel), ("tp", first.tensor_parallel), ("zero", first.zero))
    mesh = [f"{name}={size}" for name, size in axes if size > (name != "zero")]
    count = len(plan.stages)
    stages = f"{count} stage{'s' if count > 1 else ''}"
    schedule = [plan.schedule] if count > 1 else []
    return ", ".join([*mesh, stages, f"{plan.microbatches} microbatches", *schedule])


def by_name(optimizer: object) -> bool:
    """Whether other processes can make the optimizer from its name."""
    chosen = choose(optimizer)
    try:
        return choose(chosen.name).name == chosen.name
    except FxpartError:
        return False
