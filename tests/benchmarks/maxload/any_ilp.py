"""Any assignment as an integer programme for CP-SAT: a device may hold several pieces."""

from __future__ import annotations

from math import inf

from ortools.sat.python import cp_model

from .blocks import Blocks
from .programme_ilp import Expression, Programme
from .record import MaxLoadRecord
from .watch import MaxLoadWatch


def solve_any(
    blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch, seed: int, effort: float = inf
) -> float:
    """Improve ``record``; a lower bound over all assignments, infinite if none is valid.

    effort: CP-SAT's deterministic time, about a second each. One worker and a fixed seed make equal
    runs equal unless the deadline cuts them.
    """
    programme = _Any(blocks, record, watch)
    bound = programme.solve(seed, programme.found, effort)
    assert bound is not None, "there is no target"
    return bound


def within(
    blocks: Blocks,
    record: MaxLoadRecord,
    watch: MaxLoadWatch,
    seed: int,
    target: float,
    effort: float,
) -> bool:
    """Whether no assignment has loads of at most ``target``; improve ``record`` where one has.

    False also where the effort was not enough. A question without anything to minimise is often
    answered where the minimum is out of reach.
    """
    programme = _Any(blocks, record, watch, target)
    return programme.solve(seed, programme.found, effort) is not None


_TOLD_APART = 100  # blocks that rules about alike devices look at; those grow with its square


class _Any(Programme):
    def __init__(
        self,
        blocks: Blocks,
        record: MaxLoadRecord,
        watch: MaxLoadWatch,
        target: float | None = None,
    ) -> None:
        super().__init__(blocks, record, watch, target)
        self.count = blocks.accelerators + blocks.cpus
        # heavy blocks first: they are what tells accelerators apart
        self.order = sorted(range(len(blocks)), key=lambda b: (-float(blocks.work[b]), b))
        self.places = self._hinted()
        self.x: list[list[Expression]] = [[0] * self.count for _ in self.order]
        self._place()
        for d in range(self.count):
            hint = [place == d for place in self.places]
            self.loads([row[d] for row in self.x], hint, int(d >= blocks.accelerators))

    def _hinted(self) -> list[int]:
        """The device of each block in the best assignment known, numbered as first used."""
        if self.hint is None:
            return [0] * len(self.blocks)
        k, number = self.blocks.accelerators, dict[int, int]()
        for b in self.order:
            d = self.hint[b]
            kind = [e for e in number if (e < k) == (d < k)]
            number.setdefault(d, len(kind) + (0 if d < k else k))
        return [number[d] for d in self.hint]

    def _place(self) -> None:
        """Devices of a kind are alike: each is used only after the one before it."""
        for b in self.order:
            self.watch.left()
            self.x[b] = [self.new(self.places[b] == d) for d in range(self.count)]
            self.model.add_exactly_one(self.x[b])
        for first in (0, self.blocks.accelerators):
            last = self.count if first else self.blocks.accelerators
            for d in range(first + 1, last):
                for i, b in enumerate(self.order[:_TOLD_APART]):
                    earlier = [self.x[a][d - 1] for a in self.order[:i]]
                    self.model.add_bool_or([*earlier, self.x[b][d].negated()])

    def found(self, values: cp_model.CpSolverSolutionCallback) -> list[int]:
        return [next(d for d, x in enumerate(row) if values.value(x)) for row in self.x]
