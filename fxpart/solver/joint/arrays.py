"""A joint problem as NumPy arrays: a row for each option, layout or work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.joint.objective import Degrees, uniform_degrees
from fxpart.solver.joint.problem import (
    JointProblem,
    LinearCost,
    ParameterFootprint,
    count_microbatch_rows,
    count_option_devices,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class LinearCosts:
    """Linear costs, one for each option or pool: latency and seconds per byte."""

    def __init__(self, lines: Iterable[LinearCost]) -> None:
        """Stack the costs."""
        both = np.array([(x.latency, x.inverse) for x in lines], dtype=np.float64)
        self.latency, self.inverse = both[:, 0], both[:, 1]

    def __call__(self, which: Ints, sizes: Ints) -> Floats:
        """Return seconds for sizes in bytes, each with its own line; 0 for 0 bytes."""
        seconds = self.latency[which] + self.inverse[which] * sizes
        return np.where(sizes > 0, seconds, 0.0)


class ParameterFootprints:
    """Parameters of all layouts: bytes (layouts, kinds) and seconds (layouts, pools, kinds)."""

    def __init__(self, states: Sequence[ParameterFootprint | None], kinds: int, pools: int) -> None:
        """Stack the footprints; missing entries are 0."""
        none = ((0,) * kinds,) * len(states)
        rows = {
            part: [getattr(s, part) if s else z for s, z in zip(states, none, strict=True)]
            for part in ("weight", "gradient", "optimizer")
        }
        self.weight = np.array(rows["weight"], dtype=np.int64)
        self.gradient = np.array(rows["gradient"], dtype=np.int64)
        self.optimizer = np.array(rows["optimizer"], dtype=np.int64)
        left = [s.unsent if s and s.unsent else z for s, z in zip(states, none, strict=True)]
        # by gradient all-reduce over replicas
        self.sent = self.gradient - np.array(left, dtype=np.int64)
        zero = ((0.0,) * kinds,) * pools
        self.step = np.array([s.step if s else zero for s in states], dtype=np.float64)
        self.there = np.array([s is not None for s in states])


class JointArrays:
    """All tables of a problem; a row for each option (``pool``, ``size`` ...), layout or work."""

    def __init__(self, problem: JointProblem) -> None:
        """Stack all tables."""
        self.problem = problem
        kinds, pools = max(problem.kinds) + 1, len(problem.pools)
        options = problem.options
        self.kinds = np.array(problem.kinds, dtype=np.int64)
        self.counts = np.bincount(self.kinds, minlength=kinds)
        self.pool = np.array([o.pool for o in options], dtype=np.int64)
        self.layout = np.array([o.layout for o in options], dtype=np.int64)
        self.data = np.array([o.data for o in options], dtype=np.int64)
        self.zero = np.array([o.zero for o in options], dtype=np.int64)
        shards = [o.shards(problem.layouts[o.layout]) for o in options]
        self.dense_share, self.experts_share = np.array(shards, dtype=np.int64).reshape(-1, 2).T
        self.size = np.array([count_option_devices(problem, o) for o in options], dtype=np.int64)
        self.devices = np.array([p.devices for p in problem.pools], dtype=np.int64)
        self.memory = np.array([p.memory for p in problem.pools], dtype=np.int64)
        self.transfer = LinearCosts(p.transfer for p in problem.pools)
        self.reduce, self.gather = (
            LinearCosts(o.reduce for o in options),
            LinearCosts(o.gather for o in options),
        )
        self.reduce_experts = LinearCosts(o.reduce_experts for o in options)
        self.gather_experts = LinearCosts(o.gather_experts for o in options)
        layouts = problem.layouts
        self.dense = ParameterFootprints([x.dense for x in layouts], kinds, pools)
        self.experts = ParameterFootprints([x.experts for x in layouts], kinds, pools)
        self.buffer = np.array([x.buffer for x in layouts], dtype=np.int64)
        self.tie_weight = np.array([x.tie_weight for x in layouts], dtype=np.int64)
        self.tie_gradient = np.array([x.tie_gradient for x in layouts], dtype=np.int64)
        self.tie_optimizer = np.array([x.tie_optimizer for x in layouts], dtype=np.int64)
        works, none = problem.works, (0,) * kinds  # row -1 of an empty table is a row of zeros
        ahead = np.array([w.forward for w in works] or [none], dtype=np.float64)
        back = np.array([w.backward for w in works] or [none], dtype=np.float64)
        self.seconds = ahead + back
        self.activation = np.array([w.activation for w in works] or [none], dtype=np.int64)
        self.workspace = np.array([w.workspace for w in works] or [none], dtype=np.int64)
        self.rows = np.array([w.rows for w in works] or [0], dtype=np.int64)
        self._index = {(w.pool, w.layout, w.rows, w.recompute): i for i, w in enumerate(works)}

    def work(self, microbatches: int) -> Ints:
        """Return by option the row of its work, -1 if it cannot run or needs too many devices.

        An option without a work or without enough devices cannot be chosen.
        """
        batch = self.problem.batch
        found = [
            self._index.get(
                (o.pool, o.layout, count_microbatch_rows(batch, microbatches, o.data), o.recompute),
                -1,
            )
            for o in self.problem.options
        ]
        return np.where(self.size <= self.devices[self.pool], np.array(found, dtype=np.int64), -1)

    def groups(self) -> list[Ints]:
        """Return sets of options that one plan may combine: all, or one degree's if uniform."""
        every = np.arange(len(self.problem.options))
        if not self.problem.uniform:
            return [every]
        alike: dict[Degrees, list[int]] = {}
        for index in range(len(every)):
            alike.setdefault(uniform_degrees(self.problem, index), []).append(index)
        return [np.array(one, dtype=np.int64) for one in alike.values()]
