"""Partition problem of asynchronous 1F1B, with a weight mode and the costs of predictions."""

from __future__ import annotations

import msgspec

from fxpart.solver.problem import PartitionProblem


class AsyncPipelineProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cut these blocks for an asynchronous pipeline.

    problem: as for a synchronous pipeline; its schedules are ignored. weights: the weight mode's
    name. passes: seconds to make one set of predicted weights, [device type][block].
    """

    problem: PartitionProblem
    weights: str
    passes: tuple[tuple[float, ...], ...]
