"""Random stage graphs and schedules, and two independent oracles that run action lists for real."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from built_schedules import BUILDERS
from hypothesis import strategies as st

from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.builders import assign_loop_ranks, assign_v_ranks


@dataclass(frozen=True)
class Case:
    """A compute-only schedule and the stage graph it is for."""

    schedule: Schedule
    edges: tuple[StageEdge, ...]


@st.composite
def stage_graphs(draw: st.DrawFn, stages: int) -> tuple[StageEdge, ...]:
    """Edges of a stage graph: any acyclic one, mostly a chain with skips."""
    connected = draw(st.sampled_from([True, True, True, False]))
    edges = []
    for source in range(stages):
        for target in range(source + 1, stages):
            wanted = connected and target == source + 1
            if wanted or draw(st.sampled_from([True, False, False])):
                edges.append(StageEdge(source, target, draw(st.sampled_from([True, True, False]))))
    return tuple(edges)


@st.composite
def cases(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 6) -> Case:
    """A builder's schedule for a random stage graph, on one rank a stage or on fewer ranks."""
    stages = draw(st.integers(1, max_stages))
    name = draw(st.sampled_from(sorted(BUILDERS)))
    if name == "zb-v":
        stages = max(2, stages // 2 * 2)
    edges = draw(stage_graphs(stages))
    given_edges = draw(st.sampled_from([edges, None]))
    ranks = draw(placements(name, stages))
    return Case(BUILDERS[name](ranks, draw(st.integers(1, max_microbatches)), given_edges), edges)


@st.composite
def placements(draw: st.DrawFn, name: str, stages: int) -> tuple[int, ...]:
    """Ranks of the stages that the builder is made for: one each, or fewer."""
    if name == "zb-v":
        return assign_v_ranks(stages)
    if name == "async" or draw(st.booleans()):
        return tuple(draw(st.permutations(range(stages))))
    if name == "interleaved" or draw(st.booleans()):
        return assign_loop_ranks(stages, draw(st.integers(1, stages)))
    wish = [draw(st.integers(0, 2)) for _ in range(stages)]
    names = {rank: index for index, rank in enumerate(sorted(set(wish)))}
    return tuple(names[rank] for rank in wish)


@st.composite
def mutated(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule with one to three actions dropped, doubled, moved, exchanged or changed."""
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.sampled_from(range(len(ranks))))
        actions = ranks[rank]
        if not actions:
            continue
        at = draw(st.integers(0, len(actions) - 1))
        to = draw(st.integers(0, len(actions) - 1))
        how = draw(st.sampled_from(["drop", "double", "move", "swap", "neighbours", "change"]))
        if how == "drop":
            del actions[at]
        elif how == "double":
            actions.insert(to, actions[at])
        elif how == "move":
            actions.insert(to, actions.pop(at))
        elif how == "swap":
            actions[at], actions[to] = actions[to], actions[at]
        elif how == "neighbours":
            to = (at + 1) % len(actions)
            actions[at], actions[to] = actions[to], actions[at]
        else:
            actions[at] = draw(changed(actions[at], schedule))
    return Schedule(
        schedule.name, schedule.stages, schedule.microbatches,
        tuple(tuple(actions) for actions in ranks), schedule.stage_rank,
    )  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, action: Action, schedule: Schedule) -> Action:
    """Another action of the same sort: other microbatch, other peer, forward for backward."""
    microbatch = draw(st.integers(0, schedule.microbatches))
    if action.kind.is_compute:
        kind = draw(st.sampled_from([ActionKind.F, ActionKind.B]))
        return Action(action.stage, kind, microbatch)
    kind = draw(
        st.sampled_from(
            [ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B]
        )
    )
    others = [k for k in range(schedule.stages) if k != action.stage]
    return Action(action.stage, kind, microbatch, draw(st.sampled_from(others)))


class Wrong(Exception):
    """A rank could not do its next action."""


@dataclass
class Worker:
    """A rank that computes symbolically: every result is a hash of all that went into it."""

    rank: int
    schedule: Schedule
    edges: Sequence[StageEdge]
    values: dict[tuple[str, int, int], int] = field(default_factory=dict)
    mailbox: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    statistics: dict[int, int] = field(default_factory=dict)
    gradients: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, what: str, source: int, target: int, microbatch: int) -> int:
        """A value from another stage: off the mailbox (once), or at hand on this rank."""
        if self.schedule.stage_rank[source] == self.rank:
            if (what, source, microbatch) not in self.values:
                raise Wrong(f"{what} {source} {microbatch} is not computed yet")
            return self.values[what, source, microbatch]
        if (what, source, target, microbatch) not in self.mailbox:
            raise Wrong(f"{what} {source}>{target} {microbatch} has not come")
        return self.mailbox.pop((what, source, target, microbatch))

    def compute(self, action: Action) -> None:
        """Running statistics and gradients are sums in the order of the calls, of F and B or W."""
        stage, m = action.stage, action.microbatch
        if self.schedule.stage_rank[stage] != self.rank or m >= self.schedule.microbatches:
            raise Wrong(f"{action} is not to be done here")
        if action.kind is ActionKind.W:
            if ("B", stage, m) not in self.values or ("W", stage, m) in self.values:
                raise Wrong(f"{action} without I, or twice")
            result = self.values["B", stage, m]
            self.add("late", stage, result)
        elif action.kind is ActionKind.F:
            inputs = [self.take("F", e.source, stage, m) for e in self.edges if e.target == stage]
            result = hash(("F", stage, m, *inputs))
            self.statistics[stage] = hash((self.statistics.get(stage), result))
        else:
            if ("F", stage, m) not in self.values:
                raise Wrong(f"{action} without forward")
            back = [e.target for e in self.edges if e.source == stage and e.backward]
            gradients = [self.take("B", target, stage, m) for target in back]
            result = hash(("B", self.values["F", stage, m], *gradients))
            self.add("early", stage, result)
            if action.kind is ActionKind.B:
                self.add("late", stage, result)
        self.values["B" if action.kind is ActionKind.I else action.kind.value, stage, m] = result

    def add(self, what: str, stage: int, result: int) -> None:
        """A sum of gradients: of those that a split backward's first half makes, or its second."""
        self.gradients[what, stage] = hash((self.gradients.get((what, stage)), result))

    def payload(self, action: Action) -> int:
        """What a send carries; refused if it is not computed or nobody asked for it."""
        what = "F" if action.kind is ActionKind.SEND_F else "B"
        pair = (action.stage, action.peer) if what == "F" else (action.peer, action.stage)
        edges = [e for e in self.edges if (e.source, e.target) == pair]
        if not edges or (what == "B" and not (edges[0].backward and self.schedule.trains)):
            raise Wrong(f"{action} has no edge")
        if (what, action.stage, action.microbatch) not in self.values:
            raise Wrong(f"{action} before its computation")
        return self.values[what, action.stage, action.microbatch]

    def accept(self, action: Action, payload: int) -> None:
        """What a receive brings; a second one of the same kind is refused."""
        assert action.peer is not None
        what = "F" if action.kind is ActionKind.RECV_F else "B"
        key = (what, action.peer, action.stage, action.microbatch)
        if key in self.mailbox or action.stage >= self.schedule.stages:
            raise Wrong(f"{action} twice")
        self.mailbox[key] = payload


@dataclass
class Meeting:
    """Where threads meet: a transfer completes when both ends have come to it."""

    ranks: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, tuple[Action, int | None]] = field(default_factory=dict)
    answers: dict[int, int | None] = field(default_factory=dict)
    ended: int = 0
    deadlock: bool = False

    def meet(self, rank: int, other: int, action: Action, payload: int | None) -> int | None:
        """Block until the other rank is at the other end; returns its payload."""
        twin = (action.peer, _TWIN[action.kind], action.microbatch, action.stage)
        with self.lock:
            there = self.waiting.get(other)
            if other != rank and there is not None:
                found = there[0]
                if (found.stage, found.kind, found.microbatch, found.peer) == twin:
                    del self.waiting[other]
                    self.answers[other] = payload
                    self.lock.notify_all()
                    return there[1]
            self.waiting[rank] = (action, payload)
            self._look()
            self.lock.wait_for(lambda: rank in self.answers or self.deadlock)
            if rank not in self.answers:
                raise Wrong(f"rank {rank} waits for ever at {action}")
            return self.answers.pop(rank)

    def end(self) -> None:
        """A rank has come to its end, or given up."""
        with self.lock:
            self.ended += 1
            self._look()

    def _look(self) -> None:
        """Nobody left who could wake the others: that is a deadlock."""
        if len(self.waiting) + self.ended == self.ranks and self.waiting:
            self.deadlock = True
            self.lock.notify_all()


_TWIN = {
    ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B, ActionKind.RECV_B: ActionKind.SEND_B,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a threaded run: actions done per rank, and whether the results are right."""

    done: tuple[int, ...]
    right: bool


def run_threads(schedule: Schedule, edges: Sequence[StageEdge], *, compute: bool = True) -> Outcome:
    """Run the lists on real threads with blocking sends and compare with one process.

    compute False runs the transfers only and lets computations pass.
    """
    meeting = Meeting(len(schedule.ranks))
    workers = [Worker(rank, schedule, edges) for rank in range(len(schedule.ranks))]
    done = [0] * len(workers)
    failed: list[str] = []

    def work(worker: Worker) -> None:
        try:
            for action in schedule.ranks[worker.rank]:
                if action.kind.is_compute:
                    if compute:
                        worker.compute(action)
                else:
                    _transfer(worker, meeting, action, compute)
                done[worker.rank] += 1
        except Wrong as cause:
            failed.append(str(cause))
        finally:
            meeting.end()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clean = not failed and not any(worker.mailbox for worker in workers)
    return Outcome(tuple(done), clean and _results(workers) == _one_process(schedule, edges))


def _transfer(worker: Worker, meeting: Meeting, action: Action, compute: bool) -> None:
    assert action.peer is not None
    stage_rank = worker.schedule.stage_rank
    if compute and stage_rank[action.stage] != worker.rank:
        raise Wrong(f"{action} is another rank's")
    sends = action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
    payload = worker.payload(action) if sends and compute else 0 if sends else None
    answer = meeting.meet(worker.rank, stage_rank[action.peer], action, payload)
    if not sends and compute:
        assert answer is not None
        worker.accept(action, answer)


def _results(workers: Sequence[Worker]) -> tuple[dict[int, int], dict[tuple[str, int], int]]:
    statistics: dict[int, int] = {}
    gradients: dict[tuple[str, int], int] = {}
    for worker in workers:
        statistics |= worker.statistics
        gradients |= worker.gradients
    return statistics, gradients


def _one_process(
    schedule: Schedule, edges: Sequence[StageEdge]
) -> tuple[dict[int, int], dict[tuple[str, int], int]]:
    """Microbatch after microbatch, all stages forward, then all back."""
    stages = range(schedule.stages)
    alone = Schedule(
        schedule.name, schedule.stages, schedule.microbatches, ((),), (0,) * len(stages)
    )
    worker = Worker(0, alone, edges)
    for m in range(schedule.microbatches):
        for stage in stages:
            worker.compute(Action(stage, ActionKind.F, m))
        for stage in reversed(stages) if schedule.trains else ():
            worker.compute(Action(stage, ActionKind.B, m))
    return _results([worker])
