"""What a schedule does, by brute force: a machine with a state, and nothing of fxpart but actions.

Slow and plain, written from the definitions. Stages compute symbolically: a result is a hash of
all that went into it, in the order in which it went in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge

SENDS = {ActionKind.SEND_F: "F", ActionKind.SEND_B: "B"}
RECEIVES = {ActionKind.RECV_F: "F", ActionKind.RECV_B: "B"}


class Wrong(Exception):
    """An action that must not be done, or not yet."""


def does(schedule: Schedule, stage: int, microbatch: int) -> bool:
    """Whether the stage exists and does the microbatch."""
    if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
        return False
    rounds = [group for group in schedule.replicas if stage in group]
    return not rounds or rounds[0][microbatch % len(rounds[0])] == stage


def ends_of(action: Action) -> tuple[str, int, int, int]:
    """A transfer as (what, source, target, microbatch), the same for both of its ends."""
    assert action.peer is not None
    if action.kind in SENDS:
        return SENDS[action.kind], action.stage, action.peer, action.microbatch
    return RECEIVES[action.kind], action.peer, action.stage, action.microbatch


def meeting(schedule: Schedule, rank: int, position: Sequence[int]) -> int | None:
    """The rank whose next action is the other end of this rank's transfer; None if none is."""
    mine = schedule.ranks[rank][position[rank]]
    assert mine.peer is not None
    other = schedule.stage_rank[mine.peer] if 0 <= mine.peer < schedule.stages else rank
    if other == rank or position[other] >= len(schedule.ranks[other]):
        return None
    theirs = schedule.ranks[other][position[other]]
    if theirs.peer is None or (theirs.kind in SENDS) == (mine.kind in SENDS):
        return None
    return other if ends_of(theirs) == ends_of(mine) else None


def reached(schedule: Schedule) -> tuple[int, ...]:
    """How many actions each rank does when every send waits for its receive."""
    position = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                if actions[position[rank]].kind.is_compute:
                    position[rank] += 1
                else:
                    other = meeting(schedule, rank, position)
                    if other is None:
                        break
                    position[rank] += 1
                    position[other] += 1
                moved = True
    return tuple(position)


@dataclass
class Machine:
    """All ranks: what each holds, what each stage has summed, how many microbatches it keeps."""

    schedule: Schedule
    edges: Sequence[StageEdge]
    values: dict[tuple[int, str, int, int], int] = field(default_factory=dict)
    boxes: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    sums: dict[tuple[str, int], int] = field(default_factory=dict)
    versions: dict[tuple[int, int], int | None] = field(default_factory=dict)
    done: set[Action] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    stash: bool = False

    def take(self, rank: int, what: str, source: int, target: int, m: int) -> int:
        """A value that an action reads: computed on its rank, or received and not yet used."""
        if self.schedule.stage_rank[source] == rank:
            if (rank, what, source, m) not in self.values:
                raise Wrong(f"{what} of {source} is not there")
            return self.values[rank, what, source, m]
        if (what, source, target, m) not in self.boxes:
            raise Wrong(f"{what} {source}>{target} has not come")
        return self.boxes.pop((what, source, target, m))

    def compute(self, rank: int, action: Action) -> None:
        """One of F, B, I, W."""
        stage, m = action.stage, action.microbatch
        if not does(self.schedule, stage, m) or self.schedule.stage_rank[stage] != rank:
            raise Wrong(f"{action} is not this rank's")
        self.read(action)
        plain = Action(stage, action.kind, m)
        if plain in self.done:
            raise Wrong(f"{action} again")
        self.done.add(plain)
        if action.kind is ActionKind.F:
            self.forward(rank, stage, m)
            return
        if not self.schedule.trains:
            raise Wrong(f"{action} in evaluation")
        if action.kind is not ActionKind.W:
            self.inputs(rank, stage, m)
        if action.kind is not ActionKind.I:
            self.weights(rank, stage, m)

    def read(self, action: Action) -> None:
        """Weight versions: none, or with a stash that of the forward."""
        if not self.stash:
            if action.version is not None:
                raise Wrong("a version")
            return
        first = self.versions.setdefault((action.stage, action.microbatch), action.version)
        if action.version is None or first != action.version:
            raise Wrong("another version")

    def forward(self, rank: int, stage: int, m: int) -> None:
        """Reads what the producers that did the microbatch have made."""
        given = [
            self.take(rank, "F", e.source, stage, m)
            for e in self.edges
            if e.target == stage and does(self.schedule, e.source, m)
        ]
        self.values[rank, "F", stage, m] = hash(("F", stage, m, *given))
        self.add("statistics", stage, m)
        if self.schedule.trains:
            self.kept[stage] = self.kept.get(stage, 0) + 1
            self.peak[stage] = max(self.peak.get(stage, 0), self.kept[stage])
            here = [k for k, at in enumerate(self.schedule.stage_rank) if at == rank]
            total = sum(self.kept.get(k, 0) * size(k) for k in here)
            self.held[rank] = max(self.held.get(rank, 0), total)

    def inputs(self, rank: int, stage: int, m: int) -> None:
        """Gradients of a stage's inputs, from its forward and what comes back."""
        if (rank, "F", stage, m) not in self.values or (rank, "B", stage, m) in self.values:
            raise Wrong("no forward, or a second backward")
        given = [
            self.take(rank, "B", e.target, stage, m)
            for e in self.edges
            if e.source == stage and e.backward and does(self.schedule, e.target, m)
        ]
        self.values[rank, "B", stage, m] = hash(("B", stage, m, *given))
        self.add("gradients made with those of inputs", stage, m)

    def weights(self, rank: int, stage: int, m: int) -> None:
        """Gradients of a stage's weights, which frees what the forward kept."""
        if (rank, "B", stage, m) not in self.values or (rank, "W", stage, m) in self.values:
            raise Wrong("no gradients of inputs, or a second sum")
        self.values[rank, "W", stage, m] = 0
        self.add("gradients of weights", stage, m)
        self.kept[stage] -= 1

    def add(self, what: str, stage: int, m: int) -> None:
        """A sum that knows its order."""
        self.sums[what, stage] = hash((self.sums.get((what, stage)), m))

    def transfer(self, rank: int, other: int, action: Action) -> None:
        """Both ends of a transfer; action is either."""
        what, source, target, m = ends_of(action)
        sender, receiver = (rank, other) if action.kind in SENDS else (other, rank)
        pair = (source, target) if what == "F" else (target, source)
        asked = [e for e in self.edges if (e.source, e.target) == pair]
        if not asked or (what == "B" and not (asked[0].backward and self.schedule.trains)):
            raise Wrong(f"{action} has no edge")
        if not (does(self.schedule, source, m) and does(self.schedule, target, m)):
            raise Wrong(f"{action} of a microbatch that is not theirs")
        where = self.schedule.stage_rank
        if (where[source], where[target]) != (sender, receiver):
            raise Wrong(f"{action} on a rank that has not the stage")
        if (sender, what, source, m) not in self.values:
            raise Wrong(f"{action} before its computation")
        key = (what, source, target, m)
        if key in self.boxes:
            raise Wrong(f"{action} twice")
        self.boxes[key] = self.values[sender, what, source, m]


@dataclass(frozen=True)
class Verdict:
    """Whether a schedule is right, and why not.

    peaks: the most microbatches that each stage keeps. held: the most bytes that each rank keeps.
    """

    right: bool
    why: str = ""
    peaks: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


def size(stage: int) -> int:
    """Bytes that a stage keeps of a microbatch."""
    return 5 + stage % 3


def judge(schedule: Schedule, edges: Sequence[StageEdge], *, stash: bool = False) -> Verdict:
    """Run all ranks with sends that wait; right if all end with the results of one process."""
    machine = Machine(schedule, edges, stash=stash)
    position = [0] * len(schedule.ranks)
    try:
        moved = True
        while moved:
            moved = False
            for rank in range(len(position)):
                moved = _go(machine, rank, position) or moved
        if any(at < len(a) for at, a in zip(position, schedule.ranks, strict=True)):
            raise Wrong("deadlock")
        if machine.boxes:
            raise Wrong("received and not used")
        if machine.sums != _one_process(schedule):
            raise Wrong("other sums")
    except Wrong as cause:
        return Verdict(False, str(cause))
    peaks = tuple(machine.peak.get(stage, 0) for stage in range(schedule.stages))
    held = tuple(machine.held.get(rank, 0) for rank in range(len(schedule.ranks)))
    return Verdict(True, "", peaks, held)


def _go(machine: Machine, rank: int, position: list[int]) -> bool:
    """Do what the rank can do now; whether it did anything."""
    actions, start = machine.schedule.ranks[rank], position[rank]
    while position[rank] < len(actions):
        action = actions[position[rank]]
        if not does(machine.schedule, action.stage, action.microbatch):
            raise Wrong(f"{action} is of no stage or microbatch here")
        if action.kind.is_compute:
            machine.compute(rank, action)
        else:
            if machine.schedule.stage_rank[action.stage] != rank or action.version is not None:
                raise Wrong(f"{action} is not this rank's")
            other = meeting(machine.schedule, rank, position)
            if other is None:
                break
            if machine.schedule.ranks[other][position[other]].version is not None:
                raise Wrong(f"the other end of {action} names a version")
            machine.transfer(rank, other, action)
            position[other] += 1
        position[rank] += 1
    return position[rank] > start


def _one_process(schedule: Schedule) -> dict[tuple[str, int], int]:
    """The sums of one process: every stage takes its microbatches in order."""
    kinds = ["statistics"]
    if schedule.trains:
        kinds += ["gradients made with those of inputs", "gradients of weights"]
    found: dict[tuple[str, int], int] = {}
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            if does(schedule, stage, m):
                for kind in kinds:
                    found[kind, stage] = hash((found.get((kind, stage)), m))
    return found


Cost = Callable[[Action], int]


@dataclass
class Clock:
    """The machine in time, for a right schedule: who is busy until when, what has arrived."""

    schedule: Schedule
    edges: Sequence[StageEdge]
    cost: Cost
    how: str
    now: int = 0
    position: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    ended: dict[tuple[str, int, int], int] = field(default_factory=dict)
    arrived: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    queues: dict[tuple[int, int], list[Action]] = field(default_factory=dict)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    spans: dict[Action, tuple[int, int]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def there(self, what: str, source: int, target: int, m: int) -> bool:
        """Whether a stage has what another made of the microbatch, now."""
        ranks = self.schedule.stage_rank
        if ranks[source] == ranks[target]:
            return self.ended.get((what, source, m), self.now + 1) <= self.now
        return self.arrived.get((what, source, target, m), self.now + 1) <= self.now

    def ready(self, action: Action) -> bool:
        """Whether all that a computation reads is there now."""
        stage, m = action.stage, action.microbatch
        if action.kind is ActionKind.W:
            return True  # its I was done before it, on the same rank
        if action.kind is ActionKind.F:
            return all(
                self.there("F", e.source, stage, m)
                for e in self.edges
                if e.target == stage and does(self.schedule, e.source, m)
            )
        return all(
            self.there("B", e.target, stage, m)
            for e in self.edges
            if e.source == stage and e.backward and does(self.schedule, e.target, m)
        )

    def span(self, action: Action) -> int:
        """The action begins now; its end."""
        end = self.now + self.cost(action)
        heapq.heappush(self.ends, end)
        self.spans[action] = (self.now, end)
        return end

    def step(self, rank: int) -> bool:
        """The rank's next action begins now, if it can."""
        actions = self.schedule.ranks[rank]
        if self.position[rank] >= len(actions) or self.busy[rank] > self.now:
            return False
        action = actions[self.position[rank]]
        if action.kind.is_compute:
            if not self.ready(action):
                return False
            self.busy[rank] = self.span(action)
            made = (
                "F" if action.kind is ActionKind.F else "W" if action.kind is ActionKind.W else "B"
            )
            self.ended[made, action.stage, action.microbatch] = self.busy[rank]
        elif self.how == "rendezvous":
            other = meeting(self.schedule, rank, self.position)
            if other is None or self.busy[other] > self.now:
                return False
            mine = action.kind in SENDS
            send = action if mine else self.schedule.ranks[other][self.position[other]]
            self.busy[rank] = self.busy[other] = self.arrived[ends_of(send)] = self.span(send)
            self.position[other] += 1
        elif action.kind in SENDS:
            assert action.peer is not None
            link = (rank, self.schedule.stage_rank[action.peer])
            self.queues.setdefault(link, []).append(action)
        elif self.how == "buffered" and not self.there(*ends_of(action)):
            return False
        self.position[rank] += 1
        return True

    def move(self, link: tuple[int, int]) -> bool:
        """The link's next transfer begins now, if it can."""
        if not self.queues[link] or self.links.get(link, 0) > self.now:
            return False
        send = self.queues[link].pop(0)
        self.links[link] = self.arrived[ends_of(send)] = self.span(send)
        return True


def times(
    schedule: Schedule, edges: Sequence[StageEdge], cost: Cost, how: str
) -> dict[Action, tuple[int, int]]:
    """Start and end of each computation and send, on a clock that only goes on when it must.

    how: "overlapped" (sends return, receives do not hold a rank), "buffered" (receives do) or
    "rendezvous" (both ranks stop). cost: whole units of time of an action.
    """
    ranks = len(schedule.ranks)
    clock = Clock(schedule, edges, cost, how, position=[0] * ranks, busy=[0] * ranks)
    while True:
        moved = True
        while moved:
            steps = [clock.step(rank) for rank in range(ranks)]
            moved = any(steps + [clock.move(link) for link in list(clock.queues)])
        while clock.ends and clock.ends[0] <= clock.now:
            heapq.heappop(clock.ends)
        if not clock.ends:
            return clock.spans
        clock.now = clock.ends[0]
