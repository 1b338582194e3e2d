"""Cost of every class of runs as a stage under every option, as NumPy arrays.

Bytes are exact integers, seconds are equal to those of :meth:`JointScorer.stage` up to rounding.
Only *entries* (run class, option) are kept that fit in memory and can be part of a plan as fast as
the best known one. Of the entries of one class on equally many devices of one pool only those are
kept that no other beats in seconds, load and microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.joint.arrays import Floats, Ints, JointArrays, LinearCosts, Mask
from fxpart.solver.joint.block_runs import BlockRuns
from fxpart.solver.joint.bounds import CheapBounds, Prices
from fxpart.solver.joint.problem import JointChoice
from fxpart.solver.joint.stage_tables import SearchScope, StageEntries, StageTables
from fxpart.solver.joint.weight_copies import WeightCopyCounts
from fxpart.solver.objective import count_tied_reduction_messages
from fxpart.solver.schedule_costs import get_fill_fraction, has_pieces, is_stream
from fxpart.solver.tables import Number

_CHUNK = 2_000_000  # numbers in an array made at once
ENDLESS = 2**40  # microbatches in flight of a stage without activations


@dataclass(frozen=True)
class _OptionClassPairs:
    """Options with the row of their work, classes, and seconds of the work; one row each."""

    option: Ints
    work: Ints
    cls: Ints
    seconds: Floats


class JointTables(StageTables[JointChoice]):
    """Entries of a joint problem."""

    runs: BlockRuns

    def __init__(self, stacked: JointArrays, bounds: CheapBounds | None = None) -> None:
        """bounds: to omit entries that cannot be part of a good plan."""
        self.stacked, self.runs = stacked, BlockRuns(stacked.problem)
        self.devices, self.pins = stacked.devices, stacked.problem.pins
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

    def scopes(self) -> list[tuple[float, SearchScope]]:
        """Return the scopes by options that may be combined, microbatches and schedule."""
        s, problem = self.stacked, self.stacked.problem
        scopes = []
        for options in s.groups():
            least = [
                int(s.devices[p] // s.size[options][s.pool[options] == p].min())
                for p in sorted(set(s.pool[options].tolist()))
            ]
            high = min(problem.max_stages, self.runs.units, sum(least))
            scopes += [
                SearchScope(m, schedule, options, problem.min_stages, high)
                for m in problem.microbatches
                for schedule in problem.schedules
                if not has_pieces(schedule) and problem.min_stages <= high
            ]
        return [(self.bounds.bound(x.microbatches, x.schedule, x.options), x) for x in scopes]

    def list_groups(self, entries: StageEntries, stage: int) -> tuple[int, ...] | None:
        """Return the groups with the requested tensor degree of the stage; None: any."""
        problem = self.stacked.problem
        if stage >= len(problem.stage_tensor):
            return None
        devices = problem.options[0].data * problem.stage_tensor[stage]
        return tuple(np.flatnonzero(entries.size == devices).tolist())

    def choice(
        self, scope: SearchScope, starts: Sequence[int], options: Sequence[int]
    ) -> JointChoice:
        """Return the choice of the first block and the option of each stage."""
        return JointChoice(
            microbatches=scope.microbatches,
            schedule=scope.schedule,
            starts=tuple(starts),
            options=tuple(options),
        )

    def path(
        self, scope: SearchScope, choice: JointChoice
    ) -> list[tuple[int, int, int, int]] | None:
        """Return first block, pool, devices and option of the stages; None: not of this scope."""
        inside = set(choice.options) <= set(scope.options.tolist())
        if (choice.microbatches, choice.schedule) != (scope.microbatches, scope.schedule):
            return None
        pool, size = (
            x[list(choice.options)].tolist() for x in (self.stacked.pool, self.stacked.size)
        )
        stages = zip(choice.starts, pool, size, choice.options, strict=True)
        return list(stages) if inside else None

    def entries(self, scope: SearchScope, best: float) -> StageEntries:
        """Return the candidate stages of plans that take at most ``best`` seconds."""
        microbatches, options = scope.microbatches, scope.options
        share = get_fill_fraction(scope.schedule, microbatches, scope.low)
        work = self.stacked.work(microbatches)
        prices = self.bounds.prices(microbatches, scope.schedule, options)
        options = options[work[options] >= 0]
        rows = max(1, _CHUNK // max(1, self.runs.count))
        found = []
        for at in range(0, len(options) if prices.bound < inf else 0, rows):
            pairs = self._pairs(microbatches, share, options[at : at + rows], prices, best)
            found.append(self._chunk(microbatches, scope.schedule, share, pairs, prices, best))
        key = self.stacked.pool * 2**32 + self.stacked.size
        groups = np.unique(np.concatenate([key[:0], *(key[option] for option, *_ in found)]))
        columns = [
            (option, cls, np.searchsorted(groups, key[option]), filling, load, flights)
            for option, cls, filling, load, flights in found
        ]
        return StageEntries.sort(columns, groups // 2**32, groups % 2**32)

    def sharper(self, entries: StageEntries, scope: SearchScope, best: float) -> StageEntries:
        """Filter entries once a faster plan is known."""
        prices = self.bounds.prices(scope.microbatches, scope.schedule, scope.options)
        paid = (prices.pools[entries.pool] * entries.size)[entries.group]
        sums = entries.filling, entries.load, paid
        return entries.keep(self._hopeful(prices, entries.cls, *sums, best))

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
