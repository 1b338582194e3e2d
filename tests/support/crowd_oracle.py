"""An oracle for the simulator: ranks that run their lists, a clock that goes from change to change.

Written from what the runtime does (inboxes, windows), not from a graph: each rank has a place in
its list, each inbox a number of posted receives, each link a queue. What computes and moves at a
moment sets the paces; the clock goes on to the first end. Slow and straightforward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.core_imbalance import CoreImbalanceLike

WINDOW, AHEAD, STORED = 4, 2, 4
TINY = 1e-12


@dataclass
class Case:
    """What is simulated: seconds alone, hosts by rank, curves by host, transfers' weights."""

    schedule: Schedule
    edges: Sequence[StageEdge]
    forward: Sequence[float]
    backward: Sequence[float]
    transfer: dict[tuple[int, int], float]
    host: Sequence[int]
    curves: Sequence[Sequence[float]]
    weights: Sequence[float]
    windows: bool = True
    shared: bool = False  # memory: the sender copies itself, and nothing waits for a receive
    segments: dict[tuple[int, int], str] = field(default_factory=dict)
    # by stage, of a forward and of a backward: the part of the seconds alone that is talk, and the
    # part of a core that others see of it
    talk: Sequence[Sequence[tuple[float, float]]] = ()
    uneven: Sequence[CoreImbalanceLike] = ()  # by host
    shares: Sequence[float] = ()  # by rank: how often others see it, where a quota holds it


class Machine:
    """All ranks and links at a moment."""

    def __init__(self, case: Case) -> None:
        self.case, self.now = case, 0.0
        ranks = range(len(case.schedule.ranks))
        self.at = [0 for _ in ranks]
        self.computing: dict[int, list] = {}  # rank -> [action, seconds left]
        self.queues: dict[tuple[int, int], deque] = {}
        self.moving: dict[tuple[int, int], list] = {}  # link -> [send, seconds left]
        self.sending: list[deque] = [deque() for _ in ranks]  # the runtime's window
        self.inbox: dict[tuple[int, int, str], list] = {}  # sends in order
        self.posted: dict[tuple[int, int, str], int] = {}
        self.done: set[Action] = set()
        self.arrived: set[Action] = set()
        self.spans: dict[Action, tuple[float, float]] = {}
        self.start: dict[Action, float] = {}
        self.before = [0 for _ in case.curves]  # how many computed on a host
        self.spells: dict[int, list[float]] = {}  # rank -> [since when it computes, till when]
        # host -> until when a core of it is not used, or a part of it
        self.uneven: dict[int, tuple[float, float]] = {}
        for rank, actions in enumerate(case.schedule.ranks):
            for action in actions:
                if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                    key = (rank, case.schedule.stage_rank[action.peer], action.kind.value[-1])
                    self.inbox.setdefault(key, []).append(action)
                    self.posted[key] = AHEAD

    def run(self) -> dict[Action, tuple[float, float]]:
        """Start and end of each computation and send."""
        while True:
            while any([self.step(rank) for rank in range(len(self.at))] + [self.links()]):
                pass
            paces = [*self.paces()]
            if not paces:
                break
            wait = min(left[1] * slow for left, slow in paces)
            wait = min([wait, *(until - self.now for until, _ in self.uneven.values())])
            self.now += wait
            for left, slow in paces:
                left[1] -= wait / slow
            self.finish()
        lists = self.case.schedule.ranks
        assert self.at == [len(actions) for actions in lists], "it came to a stop"
        return self.spans

    def paces(self):
        """What is under way, and how many times longer than alone it takes now."""
        case = self.case
        busy = [0.0] * len(case.curves)
        for rank, (action, _) in self.computing.items():
            busy[case.host[rank]] += self.talk(action)[1] * self.share(rank)
        for host, uneven in enumerate(case.uneven):
            if case.host.count(host) > uneven.cores:
                self.even(host, busy[host], uneven)
            if host in self.uneven:  # all cores are as slow as those are that are used
                busy[host] *= uneven.cores / (busy[host] - self.uneven[host][1])
        shares: dict[str, int] = {}
        for (source, target), (send, _) in self.moving.items():
            if case.transfer[send.stage, send.peer] > 0:
                for host in {case.host[source], case.host[target]}:
                    busy[host] += case.weights[host]
                name = case.segments.get((send.stage, send.peer))
                if name:
                    shares[name] = shares.get(name, 0) + 1
        for rank, left in self.computing.items():
            part, seen = self.talk(left[0])
            others = busy[case.host[rank]] - seen * self.share(rank)
            slow = curve_at(case.curves[case.host[rank]], 1 + others)
            yield left, part + (1 - part) * slow
        for left in self.moving.values():
            yield left, shares.get(case.segments.get((left[0].stage, left[0].peer)), 1)

    def share(self, rank: int) -> float:
        """How often a rank that computes is seen."""
        return self.case.shares[rank] if self.case.shares else 1.0

    def even(self, host: int, busy: float, uneven: CoreImbalanceLike) -> None:
        """Whether all of a host's cores are used that could be."""
        before, self.before[host] = self.before[host], busy
        until, part = self.uneven.get(host, (0.0, 0.0))
        if busy > uneven.cores or busy < 2 or until <= self.now + TINY:
            part = 0.0
            self.uneven.pop(host, None)
        if busy > uneven.cores or busy < 2:
            return
        lost = uneven.risen if before < busy else 0.0
        if before > uneven.cores:
            ran = max(
                until - since
                for rank, (since, until) in self.spells.items()
                if self.case.host[rank] == host and abs(until - self.now) <= TINY
            )
            lost = uneven.fallen * min(1.0, ran / (uneven.seconds / 2))
        if lost > part:
            self.uneven[host] = (self.now + uneven.seconds, lost)

    def works(self, rank: int) -> None:
        """It begins, or goes on at once after what it did last."""
        since, until = self.spells.get(rank, (self.now, self.now))
        self.spells[rank] = [since if self.now - until <= TINY else self.now, -1.0]

    def talk(self, action: Action) -> tuple[float, float]:
        """The part of a computation in which its rank waits for others, and what is seen of it."""
        if not self.case.talk or not action.kind.is_compute:
            return 0.0, 1.0
        return self.case.talk[0 if action.kind is ActionKind.F else 1][action.stage]

    def finish(self) -> None:
        """Whatever has nothing left ends."""
        for rank in [r for r, left in self.computing.items() if left[1] <= TINY]:
            action, _ = self.computing.pop(rank)
            (self.done if action.kind.is_compute else self.arrived).add(action)
            self.spans[action] = (self.start[action], self.now)
            self.spells[rank][1] = self.now
            self.at[rank] += 1
        for link in [k for k, left in self.moving.items() if left[1] <= TINY]:
            send, _ = self.moving.pop(link)
            self.arrived.add(send)
            self.spans[send] = (self.start[send], self.now)

    def links(self) -> bool:
        """Each idle link takes the next send, if its receive is posted."""
        moved = False
        for link, queue in self.queues.items():
            if not queue or link in self.moving:
                continue
            key = (*link, queue[0].kind.value[-1])
            if self.case.windows and self.inbox[key].index(queue[0]) >= self.posted[key]:
                continue
            send = queue.popleft()
            self.start[send] = self.now
            self.moving[link] = [send, self.case.transfer[send.stage, send.peer]]
            moved = True
        self.finish()
        return moved

    def step(self, rank: int) -> bool:
        """The rank does its next action, if it can."""
        actions = self.case.schedule.ranks[rank]
        if rank in self.computing or self.at[rank] == len(actions):
            return False
        action = actions[self.at[rank]]
        if action.kind.is_compute:
            return self.compute(rank, action)
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            if self.case.windows:
                if len(self.sending[rank]) >= WINDOW:
                    if not self.sent(rank, self.sending[rank][0]):
                        return False
                    self.sending[rank].popleft()
                self.sending[rank].append(action)
            if self.case.shared:
                self.start[action] = self.now
                self.computing[rank] = [action, self.case.transfer[action.stage, action.peer]]
                self.works(rank)
                self.finish()
                return True
            link = (rank, self.case.schedule.stage_rank[action.peer])
            self.queues.setdefault(link, deque()).append(action)
        else:
            kind = "F" if action.kind is ActionKind.RECV_F else "B"
            send = Action(action.peer, ActionKind(f"SEND_{kind}"), action.microbatch, action.stage)
            key = (self.case.schedule.stage_rank[action.peer], rank, kind)
            self.posted[key] = max(self.posted[key], self.inbox[key].index(send) + 1)
        self.at[rank] += 1
        return True

    def sent(self, rank: int, send: Action) -> bool:
        """Whether a send is no longer under way."""
        if not self.case.shared:
            return send in self.arrived
        key = (rank, self.case.schedule.stage_rank[send.peer], send.kind.value[-1])
        return self.posted[key] + STORED >= self.inbox[key].index(send) + 1

    def compute(self, rank: int, action: Action) -> bool:
        """Begin a computation, if all that it needs is there."""
        stage, m, rank_of = action.stage, action.microbatch, self.case.schedule.stage_rank
        edges, takes = self.case.edges, []
        if action.kind is ActionKind.F:
            peers, kind = [e.source for e in edges if e.target == stage], "F"
        elif action.kind is ActionKind.W:
            peers, kind = [], "W"
            if Action(stage, ActionKind.I, m) not in self.done:
                return False
        else:
            peers, kind = [e.target for e in edges if e.source == stage and e.backward], "B"
            if Action(stage, ActionKind.F, m) not in self.done:
                return False
        for peer in peers:
            if rank_of[peer] == rank:
                made = (ActionKind.F,) if kind == "F" else (ActionKind.B, ActionKind.I)
                if not any(Action(peer, each, m) in self.done for each in made):
                    return False
            else:
                takes.append(Action(peer, ActionKind(f"SEND_{kind}"), m, stage))
        if not all(send in self.arrived for send in takes):
            return False
        for send in takes:
            key = (rank_of[send.stage], rank, kind)
            index = self.inbox[key].index(send)
            self.posted[key] = max(self.posted[key], index + 1 + AHEAD)
        self.start[action] = self.now
        seconds = (self.case.forward if kind == "F" else self.case.backward)[stage]
        self.computing[rank] = [
            action,
            seconds / (2 if action.kind in (ActionKind.I, ActionKind.W) else 1),
        ]
        self.works(rank)
        self.finish()
        return True


def curve_at(curve: Sequence[float], busy: float) -> float:
    """The slowdown at a number of busy ranks, by the definition's three cases."""
    if not curve:
        return 1.0
    points = list(enumerate(curve, 1))
    if busy <= 1:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= busy <= x1:
            return y0 + (y1 - y0) * (busy - x0) / (x1 - x0)
    return points[-1][1] * busy / points[-1][0]
