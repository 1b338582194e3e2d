"""Partition problem of asynchronous 1F1B, with a weight mode and the costs of predictions."""

from __future__ import annotations

import msgspec

from fxpart.solver.problem import PartitionProblem


class AsyncPipelineProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cut these blocks for an asynchronous pipeline.

    problem: as for a synchronous pipeline; its schedules are ignored. weights: the weight mode's
    name. passes: seconds to make one set of predicted weights, [device type][block]. steps: the
    factor by which the seconds of a choice are multiplied, [variant][stages - min_stages], infinite
    for numbers that are not allowed; empty: 1.
    """

    problem: PartitionProblem
    weights: str
    passes: tuple[tuple[float, ...], ...]
    steps: tuple[tuple[float, ...], ...] = ()

    def get_factor(self, variant: int, stages: int) -> float:
        """Return the factor on the seconds of a choice."""
        return self.steps[variant][stages - self.problem.min_stages] if self.steps else 1.0
