"""A stage's parameters on one rank: bytes before and after ZeRO, and what they cost a step."""

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
_CUT_FROM: dict[Part, int] = {"optimizer": 1, "gradient": 2, "weight": 3}  # ZeRO's levels


class StageState:
    """Parameters of one stage on one rank: their bytes, and the seconds a step that they cost."""

    def __init__(
        self,
        layout: ParallelLayout,
        option: ParallelOption,
        kinds: Sequence[int],
        ties: Sequence[int],
    ) -> None:
        """kinds: of the stage's blocks, one for each; ties: those that it holds."""
        self.layout, self.option, self.kinds, self.ties = layout, option, kinds, ties
        self.shares = option.data, option.data // layout.expert  # replicas of dense, of experts

    def whole(self, part: Part) -> tuple[int, int]:
        """Bytes before ZeRO: dense ones with ties, and experts'."""
        tied = sum(getattr(self.layout, f"tie_{part}")[t] for t in self.ties)
        dense, experts = (
            _sum(state, part, self.kinds) for state in (self.layout.dense, self.layout.experts)
        )
        return dense + tied, experts

    def kept(self, part: Part) -> int:
        """Bytes after ZeRO."""
        if self.option.zero < _CUT_FROM[part]:
            return sum(self.whole(part))
        return sum(-(-size // n) for size, n in zip(self.whole(part), self.shares, strict=True))

    def sent(self) -> tuple[int, int]:
        """Bytes of gradients that sums move: dense ones with ties, and experts'."""
        dense, experts = self.whole("gradient")
        left = (
            _sum(state, "unsent", self.kinds) if state is not None and state.unsent else 0
            for state in (self.layout.dense, self.layout.experts)
        )
        return dense - next(left), experts - next(left)

    def gathers(self) -> float:
        """Seconds to gather the weights once; without a gradient only ZeRO 3 has to."""
        option = self.option
        lines = option.gather, option.gather_experts
        needed = [option.zero == 3 or gradient > 0 for gradient in self.whole("gradient")]
        return fsum(
            line(size)
            for line, size, need in zip(lines, self.whole("weight"), needed, strict=True)
            if need
        )

    def reduces(self) -> float:
        """Seconds of a step's sums of gradients and, with ZeRO 1 and 2, gathering of weights."""
        dense, experts = self.sent()
        sums = self.option.reduce(dense) + self.option.reduce_experts(experts)
        return sums + (self.gathers() if self.option.zero in (1, 2) else 0.0)

    def steps(self) -> float:
        """Seconds of the optimizer, which the replicas share under ZeRO."""
        shares = self.shares if self.option.zero else (1, 1)
        return fsum(
            state.step[self.option.pool][k] / share
            for state, share in zip((self.layout.dense, self.layout.experts), shares, strict=True)
            if state is not None
            for k in self.kinds
        )

    def workspace(self, work: MicrobatchCost) -> int:
        """Bytes live only while a block runs; with ZeRO 3 a block's gathered weights are, too."""
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
