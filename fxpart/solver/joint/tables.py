"""Cost of every class of runs as a stage under every option, as NumPy arrays.

Bytes are exact integers, seconds are equal to those of :meth:`JointScorer.stage` up to rounding.
Only *entries* (run class, option) are kept that fit in memory and can be part of a plan as fast as
the best known one. Of the entries of one class on equally many devices of one pool only those are
kept that no other beats in seconds, load and microbatches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.joint.arrays import Floats, Ints, JointArrays, LinearCosts, Mask
from fxpart.solver.joint.block_runs import BlockRuns
from fxpart.solver.joint.bounds import CheapBounds, Prices
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.joint.weight_copies import WeightCopyCounts
from fxpart.solver.objective import count_tied_reduction_messages
from fxpart.solver.schedule_costs import get_fill_fraction, is_stream, keeps_all
from fxpart.solver.tables import Number

_CHUNK = 2_000_000  # numbers in an array made at once
ENDLESS = 2**40  # microbatches in flight of a stage without activations


@dataclass(frozen=True)
class StageEntries:
    """Candidate stages of one branch, sorted by group, class, filling and option; one row each.

    filling: fill * t; load: (m - fill) t + beta; flights: the most microbatches in flight that
    memory allows. A group is a number of devices (``size``) of a ``pool``.
    """

    option: Ints
    cls: Ints
    group: Ints
    filling: Floats
    load: Floats
    flights: Ints
    pool: Ints
    size: Ints

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.option)

    def deepest(self, problem: JointProblem, microbatches: int, schedule: str) -> Ints:
        """Return the most stages from each entry to the end, itself included, with which it fits.

        max_stages if that is irrelevant, 0 if none; under ZB-H1 stages of the whole pipeline. The
        number in flight grows with the stages to the end, up to the number of microbatches (without
        limit in an asynchronous pipeline), except under GPipe, which has all of them in flight.
        """
        if is_stream(schedule):
            return self.flights
        below = 0 if keeps_all(schedule) else np.minimum(self.flights, problem.max_stages)
        return np.where(self.flights >= microbatches, problem.max_stages, below)


@dataclass(frozen=True)
class _OptionClassPairs:
    """Options with the row of their work, classes, and seconds of the work; one row each."""

    option: Ints
    work: Ints
    cls: Ints
    seconds: Floats


class JointTables:
    """Entries of one problem, made on demand."""

    def __init__(self, stacked: JointArrays, bounds: CheapBounds | None = None) -> None:
        """bounds: to omit entries that cannot be part of a good plan."""
        self.stacked, self.runs = stacked, BlockRuns(stacked.problem)
        self.bounds = bounds or CheapBounds(stacked)
        s, runs = stacked, self.runs
        self._state: dict[str, tuple[Ints, Ints]] = {  # summed from the first block on, by layout
            part: (
                _summed(getattr(s.dense, part), s.kinds),
                _summed(getattr(s.experts, part), s.kinds),
            )
            for part in ("weight", "gradient", "optimizer", "sent")
        }
        ends = runs.last + 1
        self._sizes = {  # of each class: by part, dense and experts', (layouts, classes)
            part: [x[:, ends] - x[:, runs.first] for x in both]
            for part, both in self._state.items()
        }
        self._buffer = _summed(s.buffer, s.kinds)
        self._steps = [
            _summed(x.step.reshape(-1, len(s.counts)), s.kinds) for x in (s.dense, s.experts)
        ]
        self._whole = (s.dense.weight + s.experts.weight)[:, s.kinds]

    def entries(
        self, microbatches: int, schedule: str, options: Ints, best: float, stages: int
    ) -> StageEntries:
        """Return the candidate stages of plans that take at most ``best`` seconds.

        stages: the fewest; their filling is the least.
        """
        share = get_fill_fraction(schedule, microbatches, stages)
        work = self.stacked.work(microbatches)
        prices = self.bounds.prices(microbatches, schedule, options)
        options = options[work[options] >= 0]
        rows = max(1, _CHUNK // max(1, self.runs.count))
        found = []
        for at in range(0, len(options) if prices.bound < inf else 0, rows):
            pairs = self._pairs(microbatches, share, options[at : at + rows], prices, best)
            found.append(self._chunk(microbatches, schedule, share, pairs, prices, best))
        return self._sorted(found)

    def sharper(
        self,
        entries: StageEntries,
        microbatches: int,
        schedule: str,
        options: Ints,
        best: float,
    ) -> StageEntries:
        """Filter entries once a faster plan is known."""
        prices = self.bounds.prices(microbatches, schedule, options)
        paid = (prices.pools[entries.pool] * entries.size)[entries.group]
        sums = entries.filling, entries.load, paid
        keep = self._hopeful(prices, entries.cls, *sums, best)
        return StageEntries(
            entries.option[keep], entries.cls[keep], entries.group[keep], entries.filling[keep],
            entries.load[keep], entries.flights[keep], entries.pool, entries.size,
        )  # fmt: skip

    def _hopeful(
        self,
        prices: Prices,
        cls: Ints,
        filling: Floats,
        load: Floats,
        paid: Floats,
        best: float,
    ) -> Mask:
        """Return whether each may be a stage of a plan of ``best`` seconds.

        Paid: for its devices.
        """
        held, alone = self._floors(prices)
        limit = best * (1 + 1e-9)
        keep = filling + paid * load + (prices.total - held[cls]) <= limit
        return np.asarray(keep & (load + filling + (prices.least - alone[cls]) <= limit))

    def _pairs(
        self,
        microbatches: int,
        share: float,
        options: Ints,
        prices: Prices,
        best: float,
    ) -> _OptionClassPairs:
        """Return options and classes that may be in a good plan by their work alone."""
        s, runs = self.stacked, self.runs
        work = s.work(microbatches)[options]
        total = _summed(s.seconds[work], s.kinds)
        t = total[:, runs.last + 1] - total[:, runs.first]
        price = self._price(prices, share, microbatches, options)
        held, alone = self._floors(prices)
        limit = best * (1 + 1e-9)
        keep = price[:, None] * t <= limit - (prices.total - held)
        keep &= microbatches * t <= limit - (prices.least - alone)  # its filling and its load
        keep &= self._needs(options, work) <= s.memory[s.pool[options]][:, None]
        option, cls = np.nonzero(keep)
        return _OptionClassPairs(options[option], work[option], cls, t[keep])

    def _needs(self, options: Ints, work: Ints) -> Ints:
        """Return minimum bytes with one microbatch in flight, (options, classes); without ties."""
        s, runs = self.stacked, self.runs
        layout, zero = s.layout[options], s.zero[options][:, None]
        saved = _summed(s.activation[work], s.kinds)
        needs = saved[:, runs.last + 1] - saved[:, runs.first]
        for level, part in ((3, "weight"), (2, "gradient"), (1, "optimizer")):
            for which, shares in ((0, s.dense_share), (1, s.experts_share)):
                share = np.where(zero >= level, shares[options][:, None], 1)
                needs += self._sizes[part][which][layout] // share
        return needs

    def _price(self, prices: Prices, share: float, microbatches: int, options: Ints) -> Floats:
        """Return price of a second of t with each option: its filling, and its devices' load."""
        paid = prices.pools[self.stacked.pool[options]] * self.stacked.size[options]
        return share + paid * (microbatches - share)

    def _floors(self, prices: Prices) -> tuple[Floats, Floats]:
        """Return the minimum price, and the minimum filling, of each class's own blocks."""
        ends = self.runs.last + 1
        sums = [np.concatenate(([0.0], np.cumsum(x))) for x in (prices.blocks, prices.filling)]
        return (
            sums[0][ends] - sums[0][self.runs.first],
            sums[1][ends] - sums[1][self.runs.first],
        )

    def _chunk(
        self,
        microbatches: int,
        schedule: str,
        share: float,
        pairs: _OptionClassPairs,
        prices: Prices,
        best: float,
    ) -> tuple[Ints, Ints, Floats, Floats, Ints]:
        """Return rows of some pairs: option, class, filling, load, flights.

        Without hopeless ones.
        """
        t, once = self._seconds(microbatches, pairs)
        load, filling = (microbatches - share) * t + once, share * t
        flights = self._flights(microbatches, schedule, pairs)
        paid = prices.pools[self.stacked.pool[pairs.option]] * self.stacked.size[pairs.option]
        keep = self._hopeful(prices, pairs.cls, filling, load, paid, best) & (flights >= 1)
        return pairs.option[keep], pairs.cls[keep], filling[keep], load[keep], flights[keep]

    def _seconds(self, microbatches: int, pairs: _OptionClassPairs) -> tuple[Floats, Floats]:
        """Return t and beta of each pair."""
        s, runs, option, cls = self.stacked, self.runs, pairs.option, pairs.cls
        layout, pool, zero = s.layout[option], s.pool[option], s.zero[option]
        moved = s.rows[pairs.work] * runs.arrived[cls] + runs.arrived_fixed[cls]
        t = pairs.seconds + s.transfer.latency[pool] * runs.messages[cls]
        t += s.transfer.inverse[pool] * moved
        once, gathers = np.zeros_like(t), np.zeros_like(t)
        parts: tuple[tuple[int, Ints, LinearCosts, LinearCosts], ...] = (
            (0, s.dense_share, s.reduce, s.gather),
            (1, s.experts_share, s.reduce_experts, s.gather_experts),
        )
        for which, shares, reduce, gather in parts:
            gradient = self._of("gradient", which, layout, cls)
            once += reduce(option, self._of("sent", which, layout, cls))
            cost = gather(option, self._of("weight", which, layout, cls))
            gathers += np.where((zero == 3) | (gradient > 0), cost, 0.0)
            step = self._run(self._steps[which], layout * len(s.devices) + pool, cls)
            once += step / np.where(zero > 0, shares[option], 1)
        t += np.where(zero == 3, 2 * gathers, 0.0)
        once += np.where((zero == 1) | (zero == 2), gathers, 0.0)
        for tie, apart in enumerate(runs.apart):
            message = s.transfer(pool, s.tie_gradient[layout, tie])
            once += np.where(apart[cls], count_tied_reduction_messages(microbatches) * message, 0.0)
        return t, once

    def _run(self, summed: NDArray[Number], row: Ints, cls: Ints) -> NDArray[Number]:
        """Return sums of rows over the runs of classes."""
        return np.asarray(summed[row, self.runs.last[cls] + 1] - summed[row, self.runs.first[cls]])

    def _of(self, part: str, which: int, layout: Ints, cls: Ints) -> Ints:
        """Return bytes before ZeRO of weights, gradients or optimizer state, or of reduced
        gradients.

        which: 0 dense, 1 experts.
        """
        sizes = self._run(self._state[part][which], layout, cls)
        if which == 0:
            for tie, holds in enumerate(self.runs.contained):
                name = "gradient" if part == "sent" else part
                tied: Ints = getattr(self.stacked, f"tie_{name}")[layout, tie]
                sizes = sizes + np.where(holds[cls], tied, 0)
        return sizes

    def _flights(self, microbatches: int, schedule: str, pairs: _OptionClassPairs) -> Ints:
        """Return the most microbatches in flight that memory allows, with their weight copies."""
        s, runs, pool = self.stacked, self.runs, self.stacked.pool[pairs.option]
        weights, standing, each = self.bytes(pairs.option, pairs.work, pairs.cls)
        each += s.rows[pairs.work] * runs.stored[pairs.cls] + runs.stored_fixed[pairs.cls]
        room = s.memory[pool] - standing - weights
        if is_stream(schedule):
            copied = WeightCopyCounts(s.problem.weights, s.problem.max_stages)
            return copied.deepest(room, each, weights, microbatches)
        flights = np.where(each > 0, room // np.maximum(each, 1), ENDLESS)
        return np.where(room >= 0, flights, -1)

    def bytes(self, option: Ints, work: Ints, cls: Ints) -> tuple[Ints, Ints, Ints]:
        """Return bytes of weights, of all else that stands, and of activations of a microbatch."""
        s, runs = self.stacked, self.runs
        layout, zero = s.layout[option], s.zero[option]
        kept = []
        for level, part in ((3, "weight"), (2, "gradient"), (1, "optimizer")):
            dense, experts = (self._of(part, which, layout, cls) for which in (0, 1))
            cut = -(-dense // s.dense_share[option]) - (-experts // s.experts_share[option])
            kept.append(np.where(zero >= level, cut, dense + experts))
        each = self._run(_summed(s.activation, s.kinds), work, cls)
        standing = kept[1] + kept[2] + self._run(self._buffer, layout, cls)
        standing += _peaks(s.workspace[:, s.kinds], work, runs.first[cls], runs.last[cls])
        most = _peaks(self._whole, layout, runs.first[cls], runs.last[cls])
        standing += np.where(zero == 3, most, 0)
        return kept[0], standing, each

    def _sorted(self, found: list[tuple[Ints, Ints, Floats, Floats, Ints]]) -> StageEntries:
        """Sort by group, class, filling and option, and omit dominated entries."""
        s = self.stacked
        if not found:
            none = np.zeros(0, dtype=np.int64)
            return StageEntries(
                none, none, none, none.astype(float), none.astype(float), *[none] * 3
            )
        option, cls, filling, load, flights = (
            np.concatenate([x[k] for x in found]) for k in range(5)
        )
        pairs, group = np.unique(s.pool[option] * (2**32) + s.size[option], return_inverse=True)
        order = np.lexsort((option, -flights, load, filling, cls, group))
        option, cls, group = option[order], cls[order], group[order]
        filling, load, flights = filling[order], load[order], flights[order]
        keep = ~_beaten(group * (self.runs.count + 1) + cls, load, flights)
        return StageEntries(
            option[keep], cls[keep], group[keep], filling[keep], load[keep], flights[keep],
            pairs // 2**32, pairs % 2**32,
        )  # fmt: skip


def _summed(rows: NDArray[Number], kinds: Ints) -> NDArray[Number]:
    """Return sums of each row of costs by kind, from the first block on; (rows, blocks + 1)."""
    total = np.zeros((rows.shape[0], len(kinds) + 1), dtype=rows.dtype)
    np.cumsum(rows[:, kinds], axis=1, out=total[:, 1:])
    return total


def _peaks(rows: Ints, row: Ints, first: Ints, last: Ints) -> Ints:
    """Return the largest number of each row from ``first`` to ``last``, by doubling windows."""
    width = last - first + 1
    level = np.zeros(len(width), dtype=np.int64)
    while bool((2 << level <= width).any()):
        level[2 << level <= width] += 1
    most, window = np.zeros(len(row), dtype=np.int64), rows
    for k in range(int(level.max(initial=0)) + 1):
        mine = np.flatnonzero(level == k)
        right = last[mine] - (1 << k) + 1
        most[mine] = np.maximum(window[row[mine], first[mine]], window[row[mine], right])
        if window.shape[1] > 1 << k:
            window = np.maximum(window[:, : -(1 << k)], window[:, 1 << k :])
    return most


def _beaten(key: Ints, load: Floats, flights: Ints) -> Mask:
    """Return entries dominated by an earlier one of the same key, which has no longer filling."""
    beaten = np.zeros(len(key), dtype=bool)
    step = 1
    while step < len(key):
        same = key[step:] == key[:-step]
        if not same.any():
            break
        worse = same & (load[:-step] <= load[step:]) & (flights[:-step] >= flights[step:])
        beaten[step:] |= worse
        step += 1
    return beaten
