"""Any assignment as an integer programme for CP-SAT: a device may hold several pieces."""

from __future__ import annotations

from ortools.sat.python import cp_model

from fxpart.solver.maxload.blocks import Blocks
from fxpart.solver.maxload.programme_ilp import Expression, Programme
from fxpart.solver.maxload.record import Record
from fxpart.solver.maxload.watch import Watch


def solve_any(blocks: Blocks, record: Record, watch: Watch, seed: int) -> float:
    """Improve ``record``; a lower bound over all assignments, infinite if none is valid.

    One worker and a fixed seed make equal runs equal unless the deadline cuts them.
    """
    return _Any(blocks, record, watch).run(seed)


_TOLD_APART = 100  # blocks that rules about alike devices look at; those grow with its square


class _Any(Programme):
    def __init__(self, blocks: Blocks, record: Record, watch: Watch) -> None:
        super().__init__(blocks, record, watch)
        self.devices = blocks.accelerators + blocks.cpus
        # heavy blocks first: they are what tells accelerators apart
        self.order = sorted(range(len(blocks)), key=lambda b: (-float(blocks.work[b]), b))
        self.places = self._hinted()
        self.x: list[list[Expression]] = [[0] * self.devices for _ in self.order]
        self._place()
        for d in range(self.devices):
            hint = [place == d for place in self.places]
            self.loads([row[d] for row in self.x], hint, int(d >= blocks.accelerators))

    def run(self, seed: int) -> float:
        return self.solve(seed, self._found)

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
            self.x[b] = [self.new(self.places[b] == d) for d in range(self.devices)]
            self.model.add_exactly_one(self.x[b])
        for first in (0, self.blocks.accelerators):
            last = self.devices if first else self.blocks.accelerators
            for d in range(first + 1, last):
                for i, b in enumerate(self.order[:_TOLD_APART]):
                    earlier = [self.x[a][d - 1] for a in self.order[:i]]
                    self.model.add_bool_or([*earlier, self.x[b][d].negated()])

    def _found(self, values: cp_model.CpSolverSolutionCallback) -> list[int]:
        return [next(d for d, x in enumerate(row) if values.value(x)) for row in self.x]
