"""Prices meshes exactly, on the assignments of devices that may be best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, nextafter
from typing import TYPE_CHECKING

from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.errors import FxpartError, Problem
from fxpart.plan.constraint_table import DATA_AXES
from fxpart.plan.model import Plan
from fxpart.planner.cluster_views import has_curves, make_ideal_cluster
from fxpart.planner.constraints import list_fixed
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.group_orders import expand_assignments, is_unequal
from fxpart.planner.mesh_plan import (
    KnownPlacementsError,
    SlowerThanIncumbentError,
    find_even_count,
    solve_exactly,
)
from fxpart.planner.mesh_proposals import SMALL_GRAPH
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.priced_mesh import CandidateCallback
from fxpart.planner.refinement import is_measured, plan_seconds
from fxpart.planner.request import PlanRequest
from fxpart.pricing.joint_space import microbatch_counts

if TYPE_CHECKING:
    from fxpart.costs import CostModel

_LARGE = 2000  # ops of a graph for which placements are selected once
_TIGHT = 0.6  # fraction of a device's memory above which placements with less memory may be faster
_OUT_OF_MEMORY = {"FXP204", "FXP205"}
_NEAR = 1.25  # a mesh this much slower than a known plan is not tried with other placements
_FAILED = 2  # assignments without a faster plan after which no more get their own placements

Priced = tuple[Plan, GeneratedProgram]


@dataclass(frozen=True)
class IdealPrice:
    """A mesh on a cluster whose devices and links are all as good as the best of the cluster's.

    seconds: of a step, which no assignment of devices is expected to be below. microbatches,
    stages: those of that plan. placements: the sharded graphs that were priced.
    """

    seconds: float
    microbatches: int
    stages: int
    placements: tuple[ShardedGraph, ...]


def is_out_of_memory(fault: FxpartError) -> bool:
    """Return whether nothing but memory is lacking."""
    return {problem.code for problem in fault.problems} <= _OUT_OF_MEMORY


@dataclass
class AssignmentPrices:
    """The prices of assignments on one mesh. incumbent: seconds of a step to improve on.

    seconds: the shortest step of each assignment; infinity where nothing fits. certified: whether
    the best plan's placements are selected for its devices.
    """

    model: CostModel
    incumbent: float
    best: Priced | None = None
    certified: bool = False
    seconds: dict[StageAssignment, float] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(
        self, assignment: StageAssignment, price: Callable[..., Priced], *, certified: bool = False
    ) -> None:
        """Price an assignment, and keep the plan if it is better.

        price: returns the best plan; its argument ``incumbent`` is the step time to improve on.
        certified: placements are selected for the assignment, so that they have a certificate;
        such a plan is kept in place of an equally fast one without.
        """
        seconds = inf
        if self.best is None or self.certified or not certified:
            limit = self.incumbent
        else:
            limit = nextafter(self.incumbent, inf)
        try:
            made = price(incumbent=limit)
        except SlowerThanIncumbentError as fault:
            seconds = fault.seconds
        except FxpartError as fault:
            self.problems += fault.problems
        else:
            seconds = plan_seconds(made[0], self.model)
            if self.best is None or seconds < limit:
                self.best, self.incumbent = made, min(seconds, self.incumbent)
                self.certified = certified
        self.seconds[assignment] = min(seconds, self.seconds.get(assignment, inf))

    def get_best(self) -> Priced:
        """Return the best plan; raises as :meth:`MeshPricer.price`."""
        if self.best is not None:
            return self.best
        least = min(self.seconds.values(), default=inf)
        raise SlowerThanIncumbentError(least) if least < inf else FxpartError(self.problems)


@dataclass(frozen=True)
class MeshPricer:
    """Prices meshes exactly. seen: the assignments of devices that were priced."""

    front: PreparedModel
    microbatches: int | None
    on_candidate: CandidateCallback | None
    seen: set[object] = field(default_factory=set)

    def price(
        self,
        request: PlanRequest,
        assignment: StageAssignment,
        incumbent: float = inf,
        every: bool = False,
    ) -> Priced:
        """Return the best plan on the request's mesh, for any assignment that may be best.

        incumbent: the step time of a known plan, in seconds. every: as for
        :func:`~fxpart.planner.group_orders.expand_assignments`. Raises FXP2xx where nothing fits,
        and SlowerThanIncumbentError where nothing is faster.
        """
        best: Priced | None = None
        problems: list[Problem] = []
        slower: SlowerThanIncumbentError | None = None
        for one in expand_assignments(request, assignment, every=every):
            key = (str(request.mesh), request.zero, request.experts, request.offload, one)
            if key in self.seen:
                slower = slower or SlowerThanIncumbentError(incumbent)
                continue
            self.seen.add(key)
            try:
                made = self._price_assignment(request, one, incumbent)
            except SlowerThanIncumbentError as fault:
                slower = min(slower or fault, fault, key=lambda one: one.seconds)
            except FxpartError as fault:
                problems += fault.problems
            else:
                seconds = plan_seconds(made[0], request.cost_model)
                if best is None or seconds < incumbent:
                    best, incumbent = made, seconds
        if best is not None:
            return best
        raise slower or FxpartError(problems)

    def has_ideal_prices(self) -> bool:
        """Return whether meshes are compared by their price on the ideal cluster first.

        For small graphs on unequal devices and links with formulas, not measured times.
        """
        request = self.front.request
        return (
            self.front.info.nodes <= SMALL_GRAPH
            and is_unequal(request.cluster)
            and not has_curves(request.cluster)
            and not is_measured(request.cost_model, request.cluster)
        )

    def price_ideal(
        self, request: PlanRequest, assignment: StageAssignment, *, ample: bool = False
    ) -> IdealPrice:
        """Return the price of a mesh on the ideal cluster. Raises FXP2xx where nothing fits.

        ample: in unlimited memory, for which placements are selected much faster.
        """
        cluster = make_ideal_cluster(request.cluster, ample=ample)
        costs = request.cost_model.for_part(cluster)
        mine = replace(request, cluster=cluster, cost_model=costs)
        given = replace(assignment, order=None, limit=None)
        tried: list[ShardedGraph] = []
        best: IdealPrice | None = None
        fault: FxpartError | None = None
        counts = _assumed_counts(self.front, mine, given)
        while counts:
            assumed = counts.pop(0)
            placed = given if assumed is None else replace(given, microbatches=assumed)
            try:
                found = self._estimate(mine, placed, tried)
            except KnownPlacementsError:
                continue
            except FxpartError as caught:
                fault = fault or caught
                if best is not None or not is_out_of_memory(caught):
                    break
                continue
            if best is not None and found.seconds >= best.seconds:
                break
            best = found
            if ample:
                counts = []
            if found.microbatches not in (placed.microbatches, *counts[:1]):
                counts.insert(0, found.microbatches)
        if best is None:
            assert fault is not None, "there is an assumed number"
            raise fault
        # certificates hold for the ideal cluster only
        return replace(best, placements=tuple(replace(one, certificate=None) for one in tried))

    def _estimate(
        self, request: PlanRequest, assignment: StageAssignment, tried: list[ShardedGraph]
    ) -> IdealPrice:
        """Return the price of a mesh; its plan is made only where the request needs it."""
        try:
            plan, _ = self._solve(request, assignment, 0.0, tried)
        except SlowerThanIncumbentError as found:
            return IdealPrice(found.seconds, found.microbatches, found.stages, ())
        seconds = plan_seconds(plan, request.cost_model)
        return IdealPrice(seconds, plan.microbatches, len(plan.stages), ())

    def price_unequal(
        self,
        request: PlanRequest,
        assignments: Sequence[StageAssignment],
        ideal: IdealPrice,
        incumbent: float = inf,
    ) -> Priced:
        """Return the best plan on the request's mesh, for assignments of unequal devices.

        All are priced with the placements of the ideal cluster. The fastest are then priced with
        placements of their own, as long as that helps. Raises as :meth:`price`.
        """
        prices = AssignmentPrices(request.cost_model, incumbent)
        every = _expand(request, assignments, ideal)
        for one, placed in product(every, ideal.placements or (None,)):
            prices.add(one, partial(self._solve, request, one, placed=placed))
        full = [one for one in every if prices.seconds[one] == inf]
        for one, placed in product(full, self._place_in_memory(request, full, ideal, prices)):
            prices.add(one, partial(self._solve, request, one, placed=placed))
        failed = 0
        for one in sorted(every, key=prices.seconds.__getitem__) if ideal.placements else ():
            known = prices.incumbent
            prices.add(one, partial(self._price_assignment, request, one), certified=True)
            failed += prices.best is not None and prices.incumbent >= known
            if failed == _FAILED:
                break
        return prices.get_best()

    def _place_in_memory(
        self,
        request: PlanRequest,
        full: Sequence[StageAssignment],
        ideal: IdealPrice,
        prices: AssignmentPrices,
    ) -> tuple[ShardedGraph, ...]:
        """Return placements for the largest memory, where those without a limit do not fit.

        full: the assignments in which they do not. None where no better plan is expected.
        """
        if not full or not ideal.placements:
            return ()
        try:
            found = self.price_ideal(request, full[0])
        except FxpartError as fault:
            prices.problems += fault.problems
            return ()
        return found.placements if found.seconds < prices.incumbent else ()

    def _solve(
        self,
        request: PlanRequest,
        assignment: StageAssignment,
        incumbent: float,
        tried: list[ShardedGraph] | None = None,
        placed: ShardedGraph | None = None,
    ) -> Priced:
        """Return the best plan on the devices of an assignment, see ``solve_exactly``."""
        front = self.front
        return solve_exactly(
            request, front.captured, front.graph, front.info, self.microbatches,
            front.annotations, assignment, self.on_candidate, incumbent, front.shardings, tried,
            placed,
        )  # fmt: skip

    def _price_assignment(
        self,
        request: PlanRequest,
        assignment: StageAssignment,
        incumbent: float,
        tried: list[ShardedGraph] | None = None,
    ) -> Priced:
        """Return the best plan on the request's mesh and devices in one order.

        Placements are selected for an assumed number of microbatches, then for that of the plan if
        it differs. Where they do not fit, or fill most of a device's memory, they are selected for
        more microbatches too, which need less memory at once. All of this as long as it helps.
        tried: the sharded graphs that are priced are added to it. Raises as :meth:`price`.
        """
        front, microbatches = self.front, self.microbatches
        best: Priced | None = None
        last: FxpartError | SlowerThanIncumbentError | None = None
        tried = [] if tried is None else tried
        counts = _assumed_counts(front, request, assignment)
        while counts:
            assumed = counts.pop(0)
            placed = assignment if assumed is None else replace(assignment, microbatches=assumed)
            try:
                made = self._solve(request, placed, incumbent, tried)
            except KnownPlacementsError:
                if best is not None or isinstance(last, SlowerThanIncumbentError):
                    break
                continue
            except SlowerThanIncumbentError as fault:
                last = fault
                if best is not None or fault.seconds > incumbent * _NEAR:
                    break
                continue
            except FxpartError as fault:
                if best is not None:
                    break
                if not is_out_of_memory(fault):
                    raise
                last = last or fault
                continue
            model = request.cost_model
            if best is not None and plan_seconds(made[0], model) >= plan_seconds(best[0], model):
                break
            best, incumbent = made, min(incumbent, plan_seconds(made[0], model))
            if front.info.nodes > _LARGE:
                break
            if _memory_use(made[0]) < _TIGHT:
                counts.clear()
            found = made[0].microbatches
            if found not in (assumed or assignment.microbatches or microbatches or 1, *counts[:1]):
                counts.insert(0, found)
        if best is None:
            assert last is not None, "there is an assumed number"
            raise last
        return best


def _assumed_counts(
    front: PreparedModel, request: PlanRequest, assignment: StageAssignment
) -> list[int | None]:
    """Return the numbers of microbatches for which placements may be selected, ascending.

    The first is the expected number; None leaves it open. Only that one where a stage is one rank,
    so that nothing is placed. Where the plan's own number is fixed, a small graph has fewer
    microbatches too, as if the number were found.
    """
    if not request.sharded or not front.captured.symbolic:
        return [None]
    counts = microbatch_counts(front.captured.batch_size, request.stages[1])
    rows = front.captured.batch_size // request.mesh.count(*DATA_AXES)
    first = find_even_count(rows, assignment.microbatches or 1)
    more = dict.fromkeys(find_even_count(rows, count) for count in counts)
    fewer: list[int] = []
    if front.info.nodes <= SMALL_GRAPH and list_fixed(request.constraints, "microbatches"):
        fewer = sorted((count for count in more if count < first), reverse=True)
    return [None, *fewer, *(count for count in more if count > first)]


def _memory_use(plan: Plan) -> float:
    """Return the largest fraction of a memory limit that a rank's tensors need."""
    return max(
        (rank.tensors / rank.memory_limit if rank.memory_limit else 1.0)
        for rank in plan.prediction.ranks
    )


def _expand(
    request: PlanRequest, assignments: Iterable[StageAssignment], ideal: IdealPrice
) -> list[StageAssignment]:
    """Return the assignments and all orders of devices, once each, for the ideal plan's counts."""
    found: dict[StageAssignment, None] = {}
    for one in assignments:
        given = replace(one, microbatches=ideal.microbatches, stages=ideal.stages)
        found.update(dict.fromkeys(expand_assignments(request, given, every=True)))
    return list(found)
