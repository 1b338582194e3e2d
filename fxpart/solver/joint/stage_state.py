"""A stage's parameters on one rank: bytes before and after ZeRO, and their cost per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum
from typing import Literal

from fxpart.solver.joint.problem import (
    MicrobatchCost,
    ParallelLayout,
    ParallelOption,
    ParameterFootprint,
)

Part = Literal["weight", "gradient", "optimizer"]
_CUT_FROM: dict[Part, int] = {"optimizer": 1, "gradient": 2, "weight": 3}  # ZeRO levels


class StageState:
    """Parameters of one stage on one rank: their bytes, and their seconds per step."""

    def __init__(
        self,
        layout: ParallelLayout,
        option: ParallelOption,
        kinds: Sequence[int],
        ties: Sequence[int],
    ) -> None:
        """kinds: of each of the stage's blocks; ties: those in the stage."""
        self.layout, self.option, self.kinds, self.ties = layout, option, kinds, ties
        self.shares = option.shards(layout)

    def whole(self, part: Part) -> tuple[int, int]:
        """Return bytes before ZeRO: dense ones with ties, and experts'."""
        tied = sum(getattr(self.layout, f"tie_{part}")[t] for t in self.ties)
        dense, experts = (
            _sum(state, part, self.kinds) for state in (self.layout.dense, self.layout.experts)
        )
        return dense + tied, experts

    def kept(self, part: Part) -> int:
        """Return bytes after ZeRO."""
        if self.option.zero < _CUT_FROM[part]:
            return sum(self.whole(part))
        return sum(-(-size // n) for size, n in zip(self.whole(part), self.shares, strict=True))

    def sent(self) -> tuple[int, int]:
        """Return bytes of gradients that gradient reduction moves: dense and ties, and experts'."""
        dense, experts = self.whole("gradient")
        left = (
            _sum(state, "unsent", self.kinds) if state is not None and state.unsent else 0
            for state in (self.layout.dense, self.layout.experts)
        )
        return dense - next(left), experts - next(left)

    def gathers(self) -> float:
        """Return the seconds of one all-gather of the weights.

        Without a gradient only for ZeRO 3.
        """
        option = self.option
        lines = option.gather, option.gather_experts
        needed = [option.zero == 3 or gradient > 0 for gradient in self.whole("gradient")]
        return fsum(
            line(size)
            for line, size, need in zip(lines, self.whole("weight"), needed, strict=True)
            if need
        )

    def reduces(self) -> float:
        """Return the seconds of gradient reduction per step, with ZeRO 1 and 2 also weight
        gathering."""
        dense, experts = self.sent()
        sums = self.option.reduce(dense) + self.option.reduce_experts(experts)
        return sums + (self.gathers() if self.option.zero in (1, 2) else 0.0)

    def steps(self) -> float:
        """Return the seconds of the optimizer, which the replicas share under ZeRO."""
        shares = self.shares if self.option.zero else (1, 1)
        return fsum(
            state.step[self.option.pool][k] / share
            for state, share in zip((self.layout.dense, self.layout.experts), shares, strict=True)
            if state is not None
            for k in self.kinds
        )

    def workspace(self, work: MicrobatchCost) -> int:
        """Return bytes live only while a block runs; with ZeRO 3 including gathered weights."""
        most = max(work.workspace[k] for k in self.kinds)
        if self.option.zero < 3:
            return most
        layout = self.layout
        return most + max(
            layout.dense.weight[k] + (layout.experts.weight[k] if layout.experts else 0)
            for k in self.kinds
        )


def _sum(
    state: ParameterFootprint | None, part: Part | Literal["unsent"], kinds: Iterable[int]
) -> int:
    if state is None:
        return 0
    row: tuple[int, ...] = getattr(state, part)
    return sum(row[k] for k in kinds)
