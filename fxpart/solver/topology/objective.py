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

import msgspec
import numpy as np
from numpy.typing import NDArray

from fxpart.solver.topology.problem import Flow, Group, Line, Ring, Seats, Topology

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class Placed(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage of a placement: its seconds for each microbatch, and once a step, by cause.

    straddling: replicas whose tensor shards are not all on one host.
    """

    transfer_seconds: float
    exchange_seconds: float
    reduce_seconds: float
    tie_seconds: float
    straddling: int


class TopologyEvaluation(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """T in seconds, its parts by stage, the busiest card's share, and what does not fit."""

    seconds: float
    stages: tuple[Placed, ...]
    card_seconds: float
    faults: tuple[str, ...] = ()


def step_seconds(
    topology: Topology, times: list[float], once: list[float], cards: float = 0.0
) -> float:
    """T from t_s and beta_s, and the seconds of the busiest card."""
    rest = topology.microbatches - topology.fill
    longest = max(rest * t + b for t, b in zip(times, once, strict=True))
    return topology.fill * fsum(times) + max(longest, cards)


def pairs(source: int, target: int) -> tuple[Ints, Ints]:
    """Which lanes of a flow meet, from this many lanes to that many: each with its share."""
    more = np.arange(max(source, target), dtype=np.int64)
    return more * source // len(more), more * target // len(more)


@dataclass(frozen=True)
class _Load:
    """Seconds of every host's card, out and in, of a microbatch and of a step."""

    microbatch: Floats
    step: Floats


class TopologyScorer:
    """Evaluates many placements of one problem."""

    def __init__(self, topology: Topology) -> None:
        """Tables of links as arrays; which lanes meet in each flow."""
        self.topology = topology
        self.kind = np.array([p.kind for p in topology.places], dtype=np.int64)
        self.host = np.array([p.host for p in topology.places], dtype=np.int64)
        self.uplinks = np.array(topology.uplinks, dtype=np.float64)
        self._shared = bool(np.any(self.uplinks > 0))
        self._inside = np.array(_lines(topology.inside), dtype=np.float64)
        self._between = np.array([_lines(row) for row in topology.between], dtype=np.float64)
        widths = [group.lanes for group in topology.groups]
        self._meet = [pairs(widths[f.source], widths[f.target]) for f in topology.flows]

    def evaluate(self, seats: Seats) -> TopologyEvaluation:
        """What :func:`evaluate` returns."""
        topology = self.topology
        at = [np.array(lanes, dtype=np.int64) for lanes in seats]
        load = _Load(np.zeros((2, len(self.uplinks))), np.zeros((2, len(self.uplinks))))
        transfer: list[list[float]] = [[] for _ in seats]
        tie: list[list[float]] = [[] for _ in seats]
        for flow, meet in zip(topology.flows, self._meet, strict=True):
            ends = (at[flow.source][meet[0]], at[flow.target][meet[1]])
            (tie if flow.step else transfer)[flow.target].append(self._flow(flow, ends, load))
        placed = tuple(
            Placed(
                transfer_seconds=fsum(transfer[s]),
                exchange_seconds=self._exchange(group, lanes, load),
                reduce_seconds=self._reduce(group, lanes, load),
                tie_seconds=fsum(tie[s]),
                straddling=self._straddling(group, lanes),
            )
            for s, (group, lanes) in enumerate(zip(topology.groups, at, strict=True))
        )
        rest = topology.microbatches - topology.fill
        cards = float(np.max(rest * load.microbatch + load.step, initial=0.0))
        times = [
            fsum((g.seconds, p.transfer_seconds, p.exchange_seconds))
            for g, p in zip(topology.groups, placed, strict=True)
        ]
        once = [
            fsum((g.once, p.reduce_seconds, p.tie_seconds))
            for g, p in zip(topology.groups, placed, strict=True)
        ]
        return TopologyEvaluation(
            seconds=step_seconds(topology, times, once, cards),
            stages=placed,
            card_seconds=cards,
            faults=tuple(faults(topology, seats)),
        )

    def _flow(self, flow: Flow, ends: tuple[Ints, Ints], load: _Load) -> float:
        count = self.topology.groups[flow.target].lanes
        share = flow.size * count / len(ends[0])
        total = 0.0
        for source, target in (ends, ends[::-1])[: 2 if flow.back else 1]:
            wire = self._wire(source, target, flow.size, flow.messages)
            total += max(wire, self._cards(source, target, share, load, step=flow.step))
        return total

    def _exchange(self, group: Group, lanes: Ints, load: _Load) -> float:
        return self._ring(group.exchange, lanes.reshape(group.data, group.tensor), load, step=False)

    def _reduce(self, group: Group, lanes: Ints, load: _Load) -> float:
        ring = lanes.reshape(group.data, group.tensor).T
        return self._ring(group.reduce, ring, load, step=True)

    def _ring(self, ring: Ring, rows: Ints, load: _Load, *, step: bool) -> float:
        """Each row is a ring; all rows at once."""
        if rows.shape[1] < 2 or not ring.size:
            return 0.0
        source, target = rows.reshape(-1), np.roll(rows, -1, axis=1).reshape(-1)
        wire = self._wire(source, target, ring.size, ring.messages)
        return max(wire, self._cards(source, target, ring.size, load, step=step))

    def _wire(self, source: Ints, target: Ints, size: float, messages: float) -> float:
        """The slowest pair's seconds; nothing moves for 0 bytes."""
        if size <= 0:
            return 0.0
        a, b = self.kind[source], self.kind[target]
        lines = np.where((source == target)[:, None], self._inside[a], self._between[a, b])
        return float(np.max(messages * lines[:, 0] + size * lines[:, 1]))

    def _cards(self, source: Ints, target: Ints, size: float, load: _Load, *, step: bool) -> float:
        """Seconds of the busiest card for ``size`` bytes a pair; adds them to ``load``."""
        if not self._shared:
            return 0.0
        a, b = self.host[source], self.host[target]
        cross, most = a != b, 0.0
        for way, hosts in enumerate((a, b)):
            count = np.bincount(hosts[cross], minlength=len(self.uplinks))
            seconds = count * size * self.uplinks
            (load.step if step else load.microbatch)[way] += seconds
            most = max(most, float(np.max(seconds, initial=0.0)))
        return most

    def _straddling(self, group: Group, lanes: Ints) -> int:
        hosts = self.host[lanes].reshape(group.data, group.tensor)
        return int(np.count_nonzero(np.any(hosts != hosts[:, :1], axis=1)))


def evaluate(topology: Topology, seats: Seats) -> TopologyEvaluation:
    """The one definition of what a placement costs; one that does not fit has faults."""
    return TopologyScorer(topology).evaluate(seats)


def faults(topology: Topology, seats: Seats) -> list[str]:
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


def _lines(row: Sequence[Line]) -> list[tuple[float, float]]:
    return [(line.latency, line.inverse) for line in row]
