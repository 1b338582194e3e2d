"""Cost and memory of a joint choice: the one definition that judges every joint solver.

For a stage with option o, m microbatches and ``flying`` microbatches in flight, with sums over its
blocks, received values, and ties:

    t = forward + backward + received * (1, or 2 with a gradient) [+ ZeRO-3: 2 gathers]
    beta = reduce(gradient) + [ZeRO 1, 2: gather(weight)] + tie messages + optimizer
    T = fill * sum_s t_s + max_s((m - fill) t_s + beta_s)

The optimizer time is divided by the number of replicas that share it (ZeRO 1 to 3). Memory: weights
* (1 + extra copies of an asynchronous pipeline) + gradients + optimizer state (each sharded by its
ZeRO level) + buffers + flying * (activations + received and sent values) + the largest workspace
(with ZeRO 3 including the largest block's gathered weights).
"""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from typing import NamedTuple, TypeAlias

from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.evaluation import (
    ChoiceEvaluation,
    StageMemory,
    StagePeakMemory,
    check_choice,
    list_forbidden,
    list_overfull,
)
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    MicrobatchCost,
    ParallelOption,
    count_microbatch_rows,
    count_option_devices,
)
from fxpart.solver.joint.stage_state import StageState
from fxpart.solver.joint.weight_copies import WeightCopyCounts
from fxpart.solver.objective import count_tied_reduction_messages
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    has_pieces,
    is_stream,
    step_seconds,
)


class JointStage(StagePeakMemory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of a choice: its pieces as (first, last) block, its option, and its costs.

    Seconds per microbatch: forward, backward (collectives in both), collective (their share),
    transfer (values received and gradients returned), gather (ZeRO 3). Seconds per step: reduce
    (gradient reduction and ZeRO's all-gather of weights), tie (messages of tied parameters),
    optimizer.
    """

    pieces: tuple[tuple[int, int], ...]
    option: int
    forward_seconds: float
    backward_seconds: float
    collective_seconds: float
    transfer_seconds: float
    gather_seconds: float
    reduce_seconds: float
    tie_seconds: float
    optimizer_seconds: float

    @property
    def seconds(self) -> float:
        """Return t: seconds for one microbatch."""
        return fsum(
            (self.forward_seconds, self.backward_seconds, self.transfer_seconds,
             self.gather_seconds)
        )  # fmt: skip

    @property
    def step_only_seconds(self) -> float:
        """Return beta: seconds per step."""
        return fsum((self.reduce_seconds, self.tie_seconds, self.optimizer_seconds))


JointEvaluation: TypeAlias = ChoiceEvaluation[JointStage]


class JointScorer:
    """Evaluates many choices of one problem, with precomputed indices."""

    def __init__(self, problem: JointProblem) -> None:
        """Index works by key, values by consumer, and ties by block."""
        self.problem = problem
        self.copied = WeightCopyCounts(problem.weights, problem.max_stages)
        self.works: dict[tuple[int, int, int, str], MicrobatchCost] = {
            (w.pool, w.layout, w.rows, w.recompute): w for w in problem.works
        }
        self._received: list[list[int]] = [[] for _ in problem.blocks]
        self._made: list[list[int]] = [[] for _ in problem.blocks]
        self._tied: list[list[int]] = [[] for _ in problem.blocks]
        for index, value in enumerate(problem.boundaries):
            for block in value.consumers:
                self._received[block].append(index)
            if not value.saved:
                self._made[value.producer].append(index)
        for index, tie in enumerate(problem.ties):
            for block in tie.blocks:
                self._tied[block].append(index)

    def work(self, option: ParallelOption, microbatches: int) -> MicrobatchCost | None:
        """Return the cost of one microbatch with this option; None if unavailable."""
        rows = count_microbatch_rows(self.problem.batch, microbatches, option.data)
        return self.works.get((option.pool, option.layout, rows, option.recompute))

    def evaluate(self, choice: JointChoice) -> JointEvaluation:
        """Return the same as :func:`evaluate`."""
        problem = self.problem
        _well_formed(problem, choice)
        count, m = len(choice.options), choice.microbatches
        ends = (*(start - 1 for start in choice.starts[1:]), len(problem.blocks) - 1)
        pieces = list(zip(choice.starts, ends, strict=True))
        stages, faults = [], _broken(problem, choice)
        for s, index in enumerate(choice.options):
            option = problem.options[index]
            work = self.work(option, m)
            if work is None:
                faults.append(f"stage {s} cannot run {m} microbatches on {option.data} replicas")
                continue
            flying = count_stage_in_flight(choice.schedule, m, count, s, choice.virtual)
            extra = self.copied.extra(m, count - s) if is_stream(choice.schedule) else 0
            mine = tuple(pieces[s::count])
            stages.append(self.stage(index, work, mine, m, flying, extra))
        if len(stages) < count:
            return JointEvaluation(seconds=float("inf"), stages=(), faults=tuple(faults))
        seconds = step_seconds(
            [s.seconds for s in stages],
            [s.step_only_seconds for s in stages],
            m,
            get_fill_fraction(choice.schedule, m, count, choice.virtual),
        )
        names = [problem.pools[problem.options[s.option].pool].name for s in stages]
        faults += list_overfull(stages, names)
        return JointEvaluation(seconds=seconds, stages=tuple(stages), faults=tuple(faults))

    def stage(
        self,
        index: int,
        work: MicrobatchCost,
        pieces: tuple[tuple[int, int], ...],
        microbatches: int,
        flying: int,
        extra: int = 0,
    ) -> JointStage:
        """Return these pieces as one stage with option ``index``. extra: copies of its weights."""
        problem = self.problem
        option = problem.options[index]
        layout, pool = problem.layouts[option.layout], problem.pools[option.pool]
        blocks = [b for first, last in pieces for b in range(first, last + 1)]
        kinds = [problem.kinds[b] for b in blocks]
        moved, held, computed = self._values(pieces, work.rows)
        ties = sorted({t for b in blocks for t in self._tied[b]})
        inside = set(blocks)
        apart = [t for t in ties if not inside.issuperset(problem.ties[t].blocks)]
        state = StageState(layout, option, kinds, ties)
        weights = state.kept("weight")
        parameters = [t for t in ties if not problem.ties[t].buffer]
        tied = 0  # Bytes of tied buffers, which are weights in the layout.
        if len(parameters) < len(ties):
            tied = weights - StageState(layout, option, kinds, parameters).kept("weight")
        workspace = state.workspace(work)
        saved = sum(work.activation[k] for k in kinds) + computed
        return JointStage(
            pieces=pieces,
            option=index,
            forward_seconds=fsum(work.forward[k] for k in kinds),
            backward_seconds=fsum(work.backward[k] for k in kinds),
            collective_seconds=fsum(work.collective[k] for k in kinds),
            transfer_seconds=fsum(pool.transfer(size) * times for size, times in moved),
            gather_seconds=2 * state.gathers() if option.zero == 3 else 0.0,
            reduce_seconds=state.reduces(),
            tie_seconds=fsum(
                count_tied_reduction_messages(microbatches) * pool.transfer(layout.tie_gradient[t])
                for t in apart
            ),
            optimizer_seconds=state.steps(),
            memory=StageMemory(
                weights=weights - tied,
                copies=extra * weights,
                gradients=state.kept("gradient"),
                optimizer=state.kept("optimizer"),
                activations=flying * saved + workspace,
                buffers=sum(layout.buffer[k] for k in kinds) + tied,
                transfers=flying * held,
            ),
            memory_limit=pool.memory,
            in_flight=flying,
            workspace=workspace,
        )

    def _values(
        self, pieces: tuple[tuple[int, int], ...], rows: int
    ) -> tuple[list[tuple[int, int]], int, int]:
        """Return (bytes, times) of each message of a microbatch; bytes stored for one in flight.

        The bytes are those of sent and received values, and of values that the stage duplicates.
        """
        values, moved, held, computed = self.problem.boundaries, [], 0, 0
        for first, last in pieces:
            blocks = range(first, last + 1)
            received = {v for b in blocks for v in self._received[b] if values[v].producer < first}
            sent = {v for b in blocks for v in self._made[b] if values[v].consumers[-1] > last}
            for v in sorted(received):
                size = values[v].row_bytes * rows + values[v].fixed_bytes
                if values[v].sent:
                    moved.append((size, values[v].trips))
                    held += size * values[v].widened
                else:
                    computed += size
            held += sum(
                (values[v].row_bytes * rows + values[v].fixed_bytes) * values[v].widened
                for v in sorted(sent)
            )
        return moved, held, computed


def evaluate(problem: JointProblem, choice: JointChoice) -> JointEvaluation:
    """Return the cost of ``choice``, by definition.

    Raises FXP109 for a choice that does not belong to this problem; one that only violates a
    constraint or a memory limit is evaluated, with its faults.
    """
    return JointScorer(problem).evaluate(choice)


def _well_formed(problem: JointProblem, choice: JointChoice) -> None:
    """Raise FXP109 for a choice whose numbers do not belong to the problem."""
    starts, n = choice.starts, len(problem.blocks)
    why = ""
    if not starts or starts[0] != 0 or starts[-1] >= n or any(a >= b for a, b in pairwise(starts)):
        why = f"The starts {starts} do not cut {n} blocks into contiguous pieces."
    elif choice.virtual < 1 or len(starts) != len(choice.options) * choice.virtual:
        why = f"{len(starts)} pieces are not {choice.virtual} for each of the options."
    elif not all(0 <= o < len(problem.options) for o in choice.options):
        why = f"The options {choice.options} are not all among {len(problem.options)}."
    elif choice.schedule not in SCHEDULES:
        why = f"There is no schedule {choice.schedule!r}."
    elif choice.microbatches < 1 or (choice.virtual > 1) != has_pieces(choice.schedule):
        why = f"{choice.schedule} does not support {choice.microbatches} microbatches and "
        why += f"virtual={choice.virtual}."
    check_choice(why)


def _broken(problem: JointProblem, choice: JointChoice) -> list[str]:
    """Return violated constraints other than memory, as text."""
    count = len(choice.options)
    faults = list_forbidden(problem, count, choice.schedule)
    if choice.microbatches not in problem.microbatches:
        faults.append(f"{choice.microbatches} microbatches are not among those to choose from")
    most = WeightCopyCounts(problem.weights, problem.max_stages).limit(choice.microbatches)
    if is_stream(choice.schedule) and count > most:
        faults.append(
            f"{count} stages, {problem.weights} supports at most {most} with so few microbatches"
        )
    if choice.virtual > 1 and choice.virtual not in problem.virtual:
        faults.append(f"{choice.virtual} pieces per stage, allowed are {problem.virtual}")
    ends = {start - 1 for start in choice.starts[1:]}
    faults.extend(f"cut after block {b}" for b in sorted(ends & set(problem.no_cut_after)))
    faults.extend(f"no cut after block {b}" for b in sorted(set(problem.cut_after) - ends))
    faults.extend(_strayed(problem, choice))
    used = [0] * len(problem.pools)
    for index in choice.options:
        used[problem.options[index].pool] += count_option_devices(problem, problem.options[index])
    faults.extend(
        f"{taken} devices of {pool.name}, available are {pool.devices}"
        for taken, pool in zip(used, problem.pools, strict=True)
        if taken > pool.devices
    )
    if problem.uniform and len({uniform_degrees(problem, o) for o in choice.options}) > 1:
        faults.append("stages of different degrees, ZeRO levels or shard degrees")
    tensor = tuple(problem.layouts[problem.options[o].layout].tensor for o in choice.options)
    if problem.stage_tensor not in ((), tensor):
        faults.append(f"tensor degrees {tensor}, requested are {problem.stage_tensor}")
    return faults


def _strayed(problem: JointProblem, choice: JointChoice) -> list[str]:
    """Return violated pins."""
    count, faults = len(choice.options), []
    for pin in problem.pins:
        wanted = pin.stage if pin.stage >= 0 else count + pin.stage
        for block in range(pin.first, pin.last + 1):
            piece = sum(start <= block for start in choice.starts) - 1
            if piece % count != wanted:
                faults.append(f"block {block} is not on stage {pin.stage}")
                break
    return faults


class Degrees(NamedTuple):
    """The degrees of an option; shard_degree: as in a :class:`ParallelOption`."""

    data: int
    tensor: int
    expert: int
    zero: int
    recompute: str
    context: int
    shard_degree: int = 0
    offload: str = "none"


def degrees(problem: JointProblem, option: int) -> Degrees:
    """Return the degrees of an option."""
    o = problem.options[option]
    layout = problem.layouts[o.layout]
    tensor = layout.tensor // layout.context
    return Degrees(
        o.data,
        tensor,
        layout.expert,
        o.zero,
        o.recompute,
        layout.context,
        o.shard_degree,
        layout.offload,
    )


def uniform_degrees(problem: JointProblem, option: int) -> Degrees:
    """Return what stages of a uniform problem share: all degrees, without the recompute mode."""
    return degrees(problem, option)._replace(recompute="none")
