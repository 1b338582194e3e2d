"""What every class of runs would cost as a stage under every option, as NumPy arrays.

Bytes are exact integers, seconds are equal to :meth:`JointScorer.stage`'s up to rounding. Kept are
only *entries* (run class, option) that fit in memory and can be part of a plan as fast as the best
one known, and of the entries of one class on as many devices of one pool only those that no other
beats in seconds, load and microbatches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.joint.bounds import CheapBounds, Prices
from fxpart.solver.joint.problem import ScheduleName
from fxpart.solver.joint.runs import Runs
from fxpart.solver.joint.schedules import fill
from fxpart.solver.joint.stacked import Floats, Ints, Mask, Stacked, States
from fxpart.solver.objective import tie_messages
from fxpart.solver.tables import Number

_CHUNK = 2_000_000  # numbers of an array made at once
ENDLESS = 2**40  # microbatches in flight of a stage that saves nothing


@dataclass(frozen=True)
class Entries:
    """Possible stages of one branch, sorted by group, class, filling and option; one row each.

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
        """How many there are."""
        return len(self.option)


class Tables:
    """Entries of one problem, made when asked for."""

    def __init__(self, stacked: Stacked, runs: Runs, bounds: CheapBounds) -> None:
        """runs: the problem's; bounds: for leaving out what cannot be part of a good plan."""
        self.stacked, self.runs, self.bounds = stacked, runs, bounds
        s, pick = stacked, (runs.first, runs.last + 1)
        ties = runs.holds.astype(np.int64)
        self._state: dict[str, tuple[Ints, Ints]] = {}  # by part: dense and experts', by layout
        for part in ("weight", "gradient", "optimizer"):
            tied = getattr(s, f"tie_{part}") @ ties
            dense = _sums(getattr(s.dense, part)[:, s.kinds], pick) + tied
            self._state[part] = dense, _sums(getattr(s.experts, part)[:, s.kinds], pick)
        self._buffer = _sums(s.buffer[:, s.kinds], pick)
        whole = s.dense.weight + s.experts.weight
        self._largest = _Peaks(whole[:, s.kinds], runs.first, runs.last)

    def entries(
        self, microbatches: int, schedule: ScheduleName, options: Ints, best: float
    ) -> Entries:
        """What may be a stage of a plan that takes no longer than ``best`` seconds."""
        work = self.stacked.work(microbatches)
        prices = self.bounds.prices(microbatches, schedule, options)
        options = options[work[options] >= 0]
        rows = max(1, _CHUNK // max(1, self.runs.count))
        found: list[tuple[Ints, Ints, Floats, Floats, Ints]] = []
        for at in range(0, len(options) if prices.bound < inf else 0, rows):
            some = options[at : at + rows]
            found.append(self._chunk(microbatches, schedule, some, work[some], prices, best))
        return self._sorted(found)

    def _chunk(
        self,
        microbatches: int,
        schedule: ScheduleName,
        options: Ints,
        work: Ints,
        prices: Prices,
        best: float,
    ) -> tuple[Ints, Ints, Floats, Floats, Ints]:
        """Rows of some options: option, class, filling, load, flights; hopeless ones left out."""
        runs, share = self.runs, fill(schedule)
        t, once = self._seconds(microbatches, options, work)
        load = (microbatches - share) * t + once
        filling = share * t
        flights = self._flights(schedule, options, work)
        held = _sums(prices.blocks[None, :], (runs.first, runs.last + 1))
        alone = _sums(prices.filling[None, :], (runs.first, runs.last + 1))
        price = (prices.pools[self.stacked.pool[options]] * self.stacked.size[options])[:, None]
        limit = best * (1 + 1e-9)
        keep = (flights >= 1) & (filling + price * load + (prices.total - held) <= limit)
        keep &= load + filling + (prices.least - alone) <= limit
        option, cls = np.nonzero(keep)
        return options[option], cls, filling[keep], load[keep], flights[keep]

    def _seconds(self, microbatches: int, options: Ints, work: Ints) -> tuple[Floats, Floats]:
        """t and beta, (options, classes)."""
        s, runs = self.stacked, self.runs
        layout, pool, zero = s.layout[options], s.pool[options], s.zero[options, None]
        pick = (runs.first, runs.last + 1)
        t = _sums(s.seconds[work][:, s.kinds], pick)
        rows = s.rows[work][:, None]
        moved = rows * runs.arrived + runs.arrived_fixed
        t += s.transfer.latency[pool] * runs.messages + s.transfer.inverse[pool] * moved
        once = np.zeros_like(t)
        gathers = np.zeros_like(t)
        parts: tuple[tuple[int, States, Ints], ...] = (
            (0, s.dense, s.data), (1, s.experts, s.experts_share),
        )  # fmt: skip
        for which, states, shares in parts:
            reduce = (s.reduce, s.reduce_experts)[which]
            gather = (s.gather, s.gather_experts)[which]
            gradient = self._state["gradient"][which][layout]
            once += reduce(options, gradient)
            cost = gather(options, self._state["weight"][which][layout])
            gathers += np.where((zero == 3) | (gradient > 0), cost, 0.0)
            step = _sums(states.step[layout, pool][:, s.kinds], pick)
            once += step / np.where(zero > 0, shares[options, None], 1)
        t += np.where(zero == 3, 2 * gathers, 0.0)
        once += np.where((zero == 1) | (zero == 2), gathers, 0.0)
        for tie, apart in enumerate(runs.apart):
            message = s.transfer(pool, s.tie_gradient[layout, tie][:, None])
            once += np.where(apart, tie_messages(microbatches) * message, 0.0)
        return t, once

    def _flights(self, schedule: ScheduleName, options: Ints, work: Ints) -> Ints:
        """The most microbatches in flight for which memory suffices, (options, classes)."""
        s, runs = self.stacked, self.runs
        layout, zero = s.layout[options], s.zero[options, None]
        kept = []
        for level, part in ((3, "weight"), (2, "gradient"), (1, "optimizer")):
            dense, experts = (x[layout] for x in self._state[part])
            cut, shares = zero >= level, (s.data[options, None], s.experts_share[options, None])
            kept.append(
                np.where(cut, -(-dense // shares[0]) - (-experts // shares[1]), dense + experts)
            )
        each = _sums(s.activation[work][:, s.kinds], (runs.first, runs.last + 1))
        each += s.rows[work][:, None] * runs.held + runs.held_fixed
        standing = kept[1] + kept[2] + self._buffer[layout]
        standing += _Peaks(s.workspace[work][:, s.kinds], runs.first, runs.last).most
        standing += np.where(zero == 3, self._largest.most[layout], 0)
        if schedule == "async":  # a copy of the weights for each microbatch in flight
            each += kept[0]
        else:
            standing += kept[0]
        room = s.memory[s.pool[options]][:, None] - standing
        flights = np.where(each > 0, room // np.maximum(each, 1), ENDLESS)
        return np.where(room >= 0, flights, -1)

    def _sorted(self, found: list[tuple[Ints, Ints, Floats, Floats, Ints]]) -> Entries:
        """Sort by group, class, filling and option, and leave out what is beaten."""
        s = self.stacked
        if not found:
            none = np.zeros(0, dtype=np.int64)
            return Entries(none, none, none, none.astype(float), none.astype(float), *[none] * 3)
        option, cls, filling, load, flights = (
            np.concatenate([x[k] for x in found]) for k in range(5)
        )
        pairs, group = np.unique(s.pool[option] * (2**32) + s.size[option], return_inverse=True)
        order = np.lexsort((option, -flights, load, filling, cls, group))
        option, cls, group = option[order], cls[order], group[order]
        filling, load, flights = filling[order], load[order], flights[order]
        keep = ~_beaten(group * (self.runs.count + 1) + cls, load, flights)
        return Entries(
            option[keep], cls[keep], group[keep], filling[keep], load[keep], flights[keep],
            pairs // 2**32, pairs % 2**32,
        )  # fmt: skip


class _Peaks:
    """Largest entry of each row over each run, by doubling windows; shape (rows, runs)."""

    def __init__(self, rows: Ints, first: Ints, last: Ints) -> None:
        width = last - first + 1
        level = np.zeros(len(width), dtype=np.int64)
        while bool((2 << level <= width).any()):
            level[2 << level <= width] += 1
        self.most = np.zeros((len(rows), len(first)), dtype=np.int64)
        window = rows
        for k in range(int(level.max(initial=0)) + 1):
            mine = level == k
            right = last[mine] - (1 << k) + 1
            self.most[:, mine] = np.maximum(window[:, first[mine]], window[:, right])
            if window.shape[1] > 1 << k:
                window = np.maximum(window[:, : -(1 << k)], window[:, 1 << k :])


def _sums(rows: NDArray[Number], pick: tuple[Ints, Ints]) -> NDArray[Number]:
    """Sums of each row over runs [first, end)."""
    total = np.zeros((rows.shape[0], rows.shape[1] + 1), dtype=rows.dtype)
    np.cumsum(rows, axis=1, out=total[:, 1:])
    return np.asarray(total[:, pick[1]] - total[:, pick[0]])


def _beaten(key: Ints, load: Floats, flights: Ints) -> Mask:
    """Entries no better than an earlier one of the same key, which takes no longer to fill."""
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
