"""What a placement costs: the one definition that every placement solver is judged by.

For a stage with its own seconds e and e1, with the flows that it receives and its collectives,

    t = e + exchange + sum of its flows of a microbatch (twice where they return)
    beta = e1 + reduce + sum of its flows of a step
    T = fill * sum_s t_s + max(max_s((m - fill) t_s + beta_s), max_h((m - fill) n_h + n1_h))

A flow takes as long as its slowest pair of lanes. All its lanes move at once, so where a host's
devices share one network card their bytes add up on it, out and in apart, and the flow takes no
less than that. n_h, n1_h are the card's own seconds for all that crosses it in a microbatch and in
a step, whichever stage it belongs to: a card is a resource of the pipeline as a stage is. A ring is
as slow as its slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fxpart.solver.assignment.problem import (
    AssignmentProblem,
    AssignmentStage,
    LinearCost,
    RingCollective,
    Seats,
    StageFlow,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _AssignmentCostStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class AssignedStageCost(
    _AssignmentCostStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A stage of a placement: its seconds for each microbatch, and once a step, by cause.

    straddling: replicas whose tensor shards are not all on one host.
    """

    transfer_seconds: float
    exchange_seconds: float
    reduce_seconds: float
    tie_seconds: float
    straddling: int


class AssignmentEvaluation(
    _AssignmentCostStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """T in seconds, its parts by stage, the busiest card's share, and what does not fit."""

    seconds: float
    stages: tuple[AssignedStageCost, ...]
    card_seconds: float
    faults: tuple[str, ...] = ()


def step_seconds(
    topology: AssignmentProblem, times: list[float], once: list[float], cards: float = 0.0
) -> float:
    """T from t_s and beta_s, and the seconds of the busiest card."""
    rest = topology.microbatches - topology.fill
    longest = max(rest * t + b for t, b in zip(times, once, strict=True))
    return topology.fill * fsum(times) + max(longest, cards)


def pair_ranks(source: int, target: int) -> tuple[Ints, Ints]:
    """Which lanes of a flow meet, from this many lanes to that many: each with its share."""
    more = np.arange(max(source, target), dtype=np.int64)
    return more * source // len(more), more * target // len(more)


@dataclass(frozen=True)
class ConcurrentMessages:
    """Messages that go at the same time: between the lanes ``source[i]`` and ``target[i]``.

    stage: who pays; cause: for what. size: bytes of the slowest message; share: bytes that each
    pair sends over cards. Lanes are counted through all stages.
    """

    stage: int
    cause: Literal["transfer", "exchange", "reduce", "tie"]
    size: float
    messages: float
    share: float
    source: Ints
    target: Ints

    @property
    def step(self) -> bool:
        """Whether it happens once a step, not in each microbatch."""
        return self.cause in ("reduce", "tie")


def list_concurrent_messages(topology: AssignmentProblem) -> list[ConcurrentMessages]:
    """All that costs anything, stage by stage."""
    firsts = np.cumsum([0, *(group.lanes for group in topology.groups)]).tolist()
    found = []
    for s, group in enumerate(topology.groups):
        lanes = np.arange(firsts[s], firsts[s + 1], dtype=np.int64)
        rows = lanes.reshape(group.data, group.tensor)
        for flow in topology.flows:
            if flow.target == s:
                found += _flow(topology, flow, firsts)
        found += _ring(s, "exchange", group.exchange, rows)
        found += _ring(s, "reduce", group.reduce, rows.T)
    return [move for move in found if move.size > 0]


def _flow(
    topology: AssignmentProblem, flow: StageFlow, firsts: list[int]
) -> list[ConcurrentMessages]:
    widths = [topology.groups[s].lanes for s in (flow.source, flow.target)]
    source, target = pair_ranks(widths[0], widths[1])
    ends = (source + firsts[flow.source], target + firsts[flow.target])
    share = flow.size * widths[1] / len(source)
    cause: Literal["tie", "transfer"] = "tie" if flow.step else "transfer"
    return [
        ConcurrentMessages(flow.target, cause, flow.size, flow.messages, share, *way)
        for way in (ends, ends[::-1])[: 2 if flow.back else 1]
    ]


def _ring(
    stage: int, cause: Literal["exchange", "reduce"], ring: RingCollective, rows: Ints
) -> list[ConcurrentMessages]:
    """Each row is a ring; all rows at once."""
    if rows.shape[1] < 2:
        return []
    ends = (rows.reshape(-1), np.roll(rows, -1, axis=1).reshape(-1))
    return [ConcurrentMessages(stage, cause, ring.size, ring.messages, ring.size, *ends)]


class AssignmentScorer:
    """Evaluates many placements of one problem."""

    def __init__(self, topology: AssignmentProblem) -> None:
        """Tables of links as arrays; which lanes exchange messages."""
        self.topology = topology
        self.moves = list_concurrent_messages(topology)
        self.kind = np.array([p.kind for p in topology.places], dtype=np.int64)
        self.host = np.array([p.host for p in topology.places], dtype=np.int64)
        self.uplinks = np.array(topology.uplinks, dtype=np.float64)
        self._shared = bool(np.any(self.uplinks > 0))
        self._inside = np.array(_lines(topology.inside), dtype=np.float64)
        self._between = np.array([_lines(row) for row in topology.between], dtype=np.float64)

    def evaluate(self, seats: Seats) -> AssignmentEvaluation:
        """What :func:`evaluate` returns."""
        topology, groups = self.topology, self.topology.groups
        at = np.array([place for lanes in seats for place in lanes], dtype=np.int64)
        cards = np.zeros((2, len(self.uplinks)))
        seconds: list[dict[str, list[float]]] = [{} for _ in groups]
        rest = topology.microbatches - topology.fill
        for move in self.moves:
            source, target = at[move.source], at[move.target]
            busy = self._cards(move, source, target)
            cards += busy if move.step else rest * busy
            took = max(self._wire(move, source, target), float(np.max(busy, initial=0.0)))
            seconds[move.stage].setdefault(move.cause, []).append(took)
        placed = tuple(
            AssignedStageCost(
                transfer_seconds=fsum(by.get("transfer", ())),
                exchange_seconds=fsum(by.get("exchange", ())),
                reduce_seconds=fsum(by.get("reduce", ())),
                tie_seconds=fsum(by.get("tie", ())),
                straddling=self._straddling(group, lanes),
            )
            for by, group, lanes in zip(seconds, groups, seats, strict=True)
        )
        both = list(zip(groups, placed, strict=True))
        times = [fsum((g.seconds, p.transfer_seconds, p.exchange_seconds)) for g, p in both]
        once = [fsum((g.once, p.reduce_seconds, p.tie_seconds)) for g, p in both]
        busiest = float(np.max(cards, initial=0.0))
        return AssignmentEvaluation(
            seconds=step_seconds(topology, times, once, busiest),
            stages=placed,
            card_seconds=busiest,
            faults=tuple(faults(topology, seats)),
        )

    def wire(self, move: ConcurrentMessages, source: Ints, target: Ints) -> Floats:
        """Seconds of messages between places, pair by pair, cards aside."""
        a, b = self.kind[source], self.kind[target]
        lines = np.where((source == target)[:, None], self._inside[a], self._between[a, b])
        return np.asarray(move.messages * lines[:, 0] + move.size * lines[:, 1])

    def _wire(self, move: ConcurrentMessages, source: Ints, target: Ints) -> float:
        return float(np.max(self.wire(move, source, target)))

    def _cards(self, move: ConcurrentMessages, source: Ints, target: Ints) -> Floats:
        """Seconds of each host's card, out and in."""
        count = np.zeros((2, len(self.uplinks)))
        if self._shared:
            a, b = self.host[source], self.host[target]
            for way, hosts in enumerate((a, b)):
                count[way] = np.bincount(hosts[a != b], minlength=len(self.uplinks))
        return np.asarray(count * move.share * self.uplinks)

    def _straddling(self, group: AssignmentStage, lanes: Sequence[int]) -> int:
        places = np.array(lanes, dtype=np.int64)
        hosts = self.host[places].reshape(group.data, group.tensor)
        return int(np.count_nonzero(np.any(hosts != hosts[:, :1], axis=1)))


def evaluate(topology: AssignmentProblem, seats: Seats) -> AssignmentEvaluation:
    """The one definition of what a placement costs; one that does not fit has faults."""
    return AssignmentScorer(topology).evaluate(seats)


def faults(topology: AssignmentProblem, seats: Seats) -> list[str]:
    """Stages of the wrong width, and places with more lanes than devices of the pool."""
    found = [
        f"stage {s} has {len(lanes)} lanes, not {group.lanes}"
        for s, (group, lanes) in enumerate(zip(topology.groups, seats, strict=True))
        if len(lanes) != group.lanes
    ]
    pools = max((len(p.devices) for p in topology.places), default=0)
    used = np.zeros((len(topology.places), max(pools, 1)), dtype=np.int64)
    for group, lanes in zip(topology.groups, seats, strict=True):
        used[:, group.pool] += np.bincount(np.array(lanes, dtype=np.int64), minlength=len(used))
    there = np.array([p.devices for p in topology.places], dtype=np.int64)
    for place, pool in np.argwhere(used > there).tolist():
        found.append(
            f"place {place} has {there[place, pool]} devices of pool {pool}, "
            f"{used[place, pool]} are taken"
        )
    return found


def _lines(row: Sequence[LinearCost]) -> list[tuple[float, float]]:
    return [(line.latency, line.inverse) for line in row]
