"""Digest of everything that a run depends on: a plan's decisions without its predictions."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

_SHOWN = 60  # longer decisions are replaced by digests


def decisions(plan: Plan) -> dict[str, str]:
    """Return the decisions of a plan by name, as text; long ones are digests.

    A trace therefore still matches a plan whose costs were predicted again.
    """
    sharding = plan.sharding
    found: dict[str, object] = {
        "model": plan.model.fingerprint,
        "stages": [
            (s.spans, s.ranks, s.data_parallel, s.tensor_parallel, s.expert_parallel, s.zero,
             s.recompute, *((s.context_parallel,) if s.context_parallel > 1 else ()),
             *(("shards", s.shard_degree) if s.shard_degree else ()))
            for s in plan.stages
        ],
        "order": plan.order,
        "batch size": plan.batch_size,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "weights": plan.weights,
        **{
            name: value
            for name, value in (
                ("actions", plan.actions),
                ("rounds", plan.replicas),
                ("staleness", plan.staleness),
                ("precision", plan.precision if plan.precision != "fp32" else ""),
                ("transfer dtype", plan.transfer_dtype),
            )
            if value
        },
        "optimizer": plan.optimizer,
        "sharding": None if sharding is None else (
            sharding.mesh, sharding.zero, sharding.zero_axis,
            sorted((p.kind, p.names, p.placements, p.strategy) for p in sharding.placed),
        ),
    }  # fmt: skip
    return {name: _short(value) for name, value in found.items()}


def plan_key(plan: Plan) -> str:
    """Return the digest of a plan's decisions: the key of its measurements in a profile."""
    return hashlib.sha256(msgspec.json.encode(decisions(plan), order="sorted")).hexdigest()[:32]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) <= _SHOWN:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]
