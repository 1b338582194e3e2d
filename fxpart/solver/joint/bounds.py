"""Cheap lower bounds on the joint objective from sums over blocks: no search, no intervals.

A stage costs at least the sum over its blocks of the additive terms: seconds of work, and bytes of
gradients over the bandwidth. Latencies, transfers and ties are omitted. So for any weights mu >= 0
of the pools with sum_p mu_p N_p = 1

    T >= sum over blocks of min over options (fill t + mu_pool devices ((m - fill) t + beta))

(the longest stage is no shorter than the average over devices). T is also no less than the largest
block's load plus the whole filling. Options under which a block alone exceeds the memory are
omitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints, JointArrays
from fxpart.solver.schedule_costs import get_fill_fraction

_SCALES = (
    0.2,
    0.5,
    0.8,
    1.25,
    2.0,
    5.0,
)  # trial changes of a pool's weight


@dataclass(frozen=True)
class Prices:
    """A cheap bound in seconds, and its parts: a plan costs at least its stages' prices.

    pools: mu, the price of a device per second of load; blocks: the minimum price of each block,
    filling and load together, ``total`` of all; filling: of the filling alone, ``least``.
    """

    bound: float
    pools: Floats
    blocks: Floats
    filling: Floats

    @property
    def total(self) -> float:
        """Return the minimum price of all blocks."""
        return float(self.blocks.sum())

    @property
    def least(self) -> float:
        """Return the minimum filling of all blocks."""
        return float(self.filling.sum())


class CheapBounds:
    """Bounds for one problem; caches the costs of blocks for each microbatch count."""

    def __init__(self, stacked: JointArrays) -> None:
        """stacked: the problem."""
        self.stacked = stacked
        self._costs: dict[int, tuple[Floats, Floats]] = {}
        self._prices: dict[tuple[int, str, int, int, int], Prices] = {}

    def costs(self, microbatches: int) -> tuple[Floats, Floats]:
        """Return minimum additions of each kind of block to t and to beta, (options, kinds), in
        seconds.

        Infinite if impossible, because of memory or because the option has no work.
        """
        if microbatches not in self._costs:
            self._costs[microbatches] = self._block_costs(microbatches)
        return self._costs[microbatches]

    def _block_costs(self, microbatches: int) -> tuple[Floats, Floats]:
        s = self.stacked
        work, layout, zero = s.work(microbatches), s.layout, s.zero[:, None]
        once = np.zeros((len(layout), len(s.counts)))
        gathers = np.zeros_like(once)
        standing = s.buffer[layout]
        for states, share, reduce, gather in (
            (s.dense, s.dense_share, s.reduce, s.gather),
            (s.experts, s.experts_share, s.reduce_experts, s.gather_experts),
        ):
            weight, gradient = states.weight[layout], states.gradient[layout]
            optimizer, shares = states.optimizer[layout], share[:, None]
            once += reduce.inverse[:, None] * states.sent[layout]
            once += states.step[layout, s.pool] / np.where(zero > 0, shares, 1)
            needed = (zero == 3) | ((zero > 0) & (gradient > 0))
            gathers += np.where(needed, gather.inverse[:, None] * weight, 0.0)
            # the sum of rounded-up parts is no less than the rounded-up sum, so rounding down is
            # safe
            standing = standing + np.where(zero >= 3, weight // shares, weight)
            standing = standing + np.where(zero >= 2, gradient // shares, gradient)
            standing = standing + np.where(zero >= 1, optimizer // shares, optimizer)
        t = s.seconds[work] + np.where(zero == 3, 2 * gathers, 0.0)
        once += np.where(zero < 3, gathers, 0.0)
        needs = standing + s.activation[work] + s.workspace[work]
        wrong = (needs > s.memory[s.pool][:, None]) | (work < 0)[:, None]
        return np.where(wrong, inf, t), np.where(wrong, inf, once)

    def bound(self, microbatches: int, schedule: str, options: Ints, virtual: int = 1) -> float:
        """Return bound in seconds on plans of this microbatch count, schedule and these options."""
        return self.prices(microbatches, schedule, options, virtual).bound

    def prices(self, microbatches: int, schedule: str, options: Ints, virtual: int = 1) -> Prices:
        """Return the bound and its parts."""
        key = (microbatches, schedule, virtual, int(options[0]), len(options))
        if key not in self._prices:
            self._prices[key] = self._priced(microbatches, schedule, options, virtual)
        return self._prices[key]

    def _priced(self, microbatches: int, schedule: str, options: Ints, virtual: int) -> Prices:
        s = self.stacked
        share = get_fill_fraction(schedule, microbatches, s.problem.min_stages, virtual)
        t, once = (x[options] for x in self.costs(microbatches))
        wrong = np.isinf(t)
        t = np.where(wrong, 0.0, t)  # no 0 * inf
        load = np.where(wrong, inf, (microbatches - share) * t + once)
        filling = np.where(wrong, inf, share * t)
        least = filling.min(axis=0)
        total = float((s.counts * least).sum())
        if not total < inf:
            none = np.zeros(len(s.kinds))
            return Prices(inf, np.zeros(len(s.devices)), none, none)
        stages = min(s.problem.max_stages, len(s.kinds))
        shared = float((s.counts * load.min(axis=0)).sum()) / stages
        best = total + max(float(load.min(axis=0).max()), shared)
        averaged, weights, blocks = self._averaged(filling, load, options)
        return Prices(max(best, averaged), weights, blocks[s.kinds], least[s.kinds])

    def _averaged(
        self, filling: Floats, load: Floats, options: Ints
    ) -> tuple[float, Floats, Floats]:
        """Return the bound over pool weights, improved one at a time; the weights; the summands."""
        s = self.stacked
        size, pool = s.size[options], s.pool[options]
        usable = s.devices.astype(np.float64)
        if s.problem.uniform and len(set(size.tolist())) == 1:
            usable = (s.devices // size[0] * size[0]).astype(np.float64)
        usable = np.where(np.isin(np.arange(len(usable)), pool), usable, 0.0)

        def value(weights: Floats) -> tuple[float, Floats, Floats]:
            scaled = weights / float((weights * usable).sum())
            least = (filling + (scaled[pool] * size)[:, None] * load).min(axis=0)
            return float((s.counts * least).sum()), scaled, least

        weights = np.ones(len(usable))
        best = value(weights)
        for p in np.flatnonzero(usable) if np.count_nonzero(usable) > 1 else ():
            start = weights[p]
            for scale in _SCALES:
                trial = weights.copy()
                trial[p] = start * scale
                found = value(trial)
                if found[0] > best[0]:
                    best, weights = found, trial
        return best
