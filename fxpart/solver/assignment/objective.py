"""Cost of a device assignment: the one definition that judges every assignment solver.

For a stage with its own seconds e and e1, with its incoming flows and its collectives,

    t = e + exchange + sum of its flows of a microbatch (twice where they return)
    beta = e1 + reduce + sum of its flows of a step
    T = fill * sum_s t_s + max(max_s((m - fill) t_s + beta_s), max_h((m - fill) n_h + n1_h))

A flow takes as long as its slowest pair of mesh ranks. All its mesh ranks send at once. If the
devices of a host share one network adapter, their bytes add up on it, separately for each
direction, and the flow takes at least that time. n_h, n1_h are the adapter's own seconds for all
traffic that crosses it in a microbatch and in a step, whichever stage it belongs to: an adapter is
a resource of the pipeline like a stage. A ring is as slow as its slowest link.
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
    DeviceAssignment,
    LinearCost,
    RingCollective,
    StageFlow,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _AssignmentCostStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class AssignedStageCost(
    _AssignmentCostStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Assigned stage: its seconds per microbatch and per step, by cause.

    straddling: number of replicas whose tensor shards are on several hosts.
    """

    transfer_seconds: float
    exchange_seconds: float
    reduce_seconds: float
    tie_seconds: float
    straddling: int


class AssignmentEvaluation(
    _AssignmentCostStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """T in seconds, its parts by stage, the time of the busiest adapter, and violations."""

    seconds: float
    stages: tuple[AssignedStageCost, ...]
    card_seconds: float
    faults: tuple[str, ...] = ()


def step_seconds(
    topology: AssignmentProblem, times: list[float], once: list[float], cards: float = 0.0
) -> float:
    """Return T from t_s and beta_s, and the seconds of the busiest adapter."""
    rest = topology.microbatches - topology.fill
    longest = max(rest * t + b for t, b in zip(times, once, strict=True))
    return topology.fill * fsum(times) + max(longest, cards)


def pair_ranks(source: int, target: int) -> tuple[Ints, Ints]:
    """Return the communicating pairs of mesh ranks of a flow, each with its share of the bytes."""
    more = np.arange(max(source, target), dtype=np.int64)
    return more * source // len(more), more * target // len(more)


@dataclass(frozen=True)
class ConcurrentMessages:
    """Concurrent messages between the mesh ranks ``source[i]`` and ``target[i]``.

    stage: the stage that is charged; cause: of the message. size: bytes of the slowest message;
    share: bytes that each pair sends over adapters. Mesh ranks are numbered through all stages.
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
        """Return whether it happens per step, instead of per microbatch."""
        return self.cause in ("reduce", "tie")


def list_concurrent_messages(topology: AssignmentProblem) -> list[ConcurrentMessages]:
    """Return all messages that have a cost, stage by stage."""
    firsts = np.cumsum([0, *(group.mesh_ranks for group in topology.groups)]).tolist()
    found = []
    for s, group in enumerate(topology.groups):
        mesh_ranks = np.arange(firsts[s], firsts[s + 1], dtype=np.int64)
        rows = mesh_ranks.reshape(group.data, group.tensor)
        for flow in topology.flows:
            if flow.target == s:
                found += _flow(topology, flow, firsts)
        found += _ring(s, "exchange", group.exchange, rows)
        found += _ring(s, "reduce", group.reduce, rows.T)
    return [move for move in found if move.size > 0]


def _flow(
    topology: AssignmentProblem, flow: StageFlow, firsts: list[int]
) -> list[ConcurrentMessages]:
    widths = [topology.groups[s].mesh_ranks for s in (flow.source, flow.target)]
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
    """Return the messages of rings, one per row; all rows run at once."""
    if rows.shape[1] < 2:
        return []
    ends = (rows.reshape(-1), np.roll(rows, -1, axis=1).reshape(-1))
    return [ConcurrentMessages(stage, cause, ring.size, ring.messages, ring.size, *ends)]


class AssignmentScorer:
    """Evaluates many assignments of one problem."""

    def __init__(self, topology: AssignmentProblem) -> None:
        """Convert tables of links to arrays, and list the messages."""
        self.topology = topology
        self.moves = list_concurrent_messages(topology)
        self.kind = np.array([p.kind for p in topology.places], dtype=np.int64)
        self.host = np.array([p.host for p in topology.places], dtype=np.int64)
        self.uplinks = np.array(topology.uplinks, dtype=np.float64)
        self._shared = bool(np.any(self.uplinks > 0))
        self._inside = np.array(_lines(topology.inside), dtype=np.float64)
        self._between = np.array([_lines(row) for row in topology.between], dtype=np.float64)

    def evaluate(self, assignment: DeviceAssignment) -> AssignmentEvaluation:
        """Return the same as :func:`evaluate`."""
        topology, groups = self.topology, self.topology.groups
        at = np.array([place for mesh_ranks in assignment for place in mesh_ranks], dtype=np.int64)
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
                straddling=self._straddling(group, mesh_ranks),
            )
            for by, group, mesh_ranks in zip(seconds, groups, assignment, strict=True)
        )
        both = list(zip(groups, placed, strict=True))
        times = [fsum((g.seconds, p.transfer_seconds, p.exchange_seconds)) for g, p in both]
        once = [fsum((g.once, p.reduce_seconds, p.tie_seconds)) for g, p in both]
        busiest = float(np.max(cards, initial=0.0))
        return AssignmentEvaluation(
            seconds=step_seconds(topology, times, once, busiest),
            stages=placed,
            card_seconds=busiest,
            faults=tuple(faults(topology, assignment)),
        )

    def wire(self, move: ConcurrentMessages, source: Ints, target: Ints) -> Floats:
        """Return the seconds of messages between domains, pair by pair, without adapters."""
        a, b = self.kind[source], self.kind[target]
        lines = np.where((source == target)[:, None], self._inside[a], self._between[a, b])
        return np.asarray(move.messages * lines[:, 0] + move.size * lines[:, 1])

    def _wire(self, move: ConcurrentMessages, source: Ints, target: Ints) -> float:
        return float(np.max(self.wire(move, source, target)))

    def _cards(self, move: ConcurrentMessages, source: Ints, target: Ints) -> Floats:
        """Return the seconds of each host's adapter, out and in."""
        count = np.zeros((2, len(self.uplinks)))
        if self._shared:
            a, b = self.host[source], self.host[target]
            for way, hosts in enumerate((a, b)):
                count[way] = np.bincount(hosts[a != b], minlength=len(self.uplinks))
        return np.asarray(count * move.share * self.uplinks)

    def _straddling(self, group: AssignmentStage, mesh_ranks: Sequence[int]) -> int:
        places = np.array(mesh_ranks, dtype=np.int64)
        hosts = self.host[places].reshape(group.data, group.tensor)
        return int(np.count_nonzero(np.any(hosts != hosts[:, :1], axis=1)))


def evaluate(topology: AssignmentProblem, assignment: DeviceAssignment) -> AssignmentEvaluation:
    """Return the cost of an assignment, by definition; an invalid one has faults."""
    return AssignmentScorer(topology).evaluate(assignment)


def faults(topology: AssignmentProblem, assignment: DeviceAssignment) -> list[str]:
    """Return stages of wrong width, and domains with more mesh ranks than devices of the pool."""
    found = [
        f"stage {s} has {len(mesh_ranks)} mesh ranks instead of {group.mesh_ranks}"
        for s, (group, mesh_ranks) in enumerate(zip(topology.groups, assignment, strict=True))
        if len(mesh_ranks) != group.mesh_ranks
    ]
    pools = max((len(p.devices) for p in topology.places), default=0)
    used = np.zeros((len(topology.places), max(pools, 1)), dtype=np.int64)
    for group, mesh_ranks in zip(topology.groups, assignment, strict=True):
        used[:, group.pool] += np.bincount(
            np.array(mesh_ranks, dtype=np.int64), minlength=len(used)
        )
    there = np.array([p.devices for p in topology.places], dtype=np.int64)
    for place, pool in np.argwhere(used > there).tolist():
        found.append(
            f"domain {place} has {there[place, pool]} devices of pool {pool}, "
            f"but {used[place, pool]} are assigned"
        )
    return found


def _lines(row: Sequence[LinearCost]) -> list[tuple[float, float]]:
    return [(line.latency, line.inverse) for line in row]
