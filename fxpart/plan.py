"""The plan: every decision, what it is predicted to cost, and how good it is proved to be. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from fxpart.cluster import Cluster

VERSION = 1


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class PlanInput(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input tensor: shape entries are numbers or symbols; batch_dim None means passed whole."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    batch_dim: int | None = None


class PlanModel(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model the plan is for.

    fingerprint: digest of the annotated graph (ops, shapes, state names, blocks). capture: "export",
    "export-strict" or "symbolic-trace". batch: "symbolic" or "fixed" (captured at the microbatch size).
    blocks: how many blocks the graph has. parameters: count of elements; parameter_bytes: bytes.
    """

    name: str
    fingerprint: str
    capture: str
    batch: Literal["symbolic", "fixed"]
    nodes: int
    blocks: int
    parameters: int
    parameter_bytes: int
    inputs: tuple[PlanInput, ...]


class Stage(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: blocks [first, last] (inclusive) on the given ranks, one rank for each replica."""

    index: int
    first: int
    last: int
    label: str
    ranks: tuple[int, ...]
    data_parallel: int = 1
    tensor_parallel: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    parameters: int = 0


class Tie(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter used on several stages: names (main first), the owner, all holders."""

    names: tuple[str, ...]
    owner: int
    stages: tuple[int, ...]


class Memory(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak memory of a rank in bytes, by cause."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    transfers: int

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return (
            self.weights + self.gradients + self.optimizer
            + self.activations + self.buffers + self.transfers
        )  # fmt: skip


class RankPrediction(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank is predicted to need; seconds are per microbatch, except sync and optimizer (per step)."""

    rank: int
    stage: int
    device: str
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    sync_seconds: float
    optimizer_seconds: float
    memory: Memory
    memory_limit: int
    in_flight: int


class Prediction(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time in seconds: the closed form that was minimised, and the simulated schedule."""

    step_seconds: float
    simulated_seconds: float
    bubble: float
    ranks: tuple[RankPrediction, ...]


class Certificate(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good the plan is: the true optimum of the objective lies in [lower_bound, objective].

    gap: (objective - lower_bound) / objective. over: what the bound is over, in words.
    """

    status: Literal["optimal", "within gap", "best found"]
    objective: float
    lower_bound: float
    gap: float
    solver: str
    over: str


class Alternative(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rejected choice: its cost (None if it does not fit) and why it lost."""

    stages: int
    microbatches: int
    step_seconds: float | None
    why: str


class Plan(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All decisions for one model on one cluster; canonical JSON, no time and no host in it."""

    format: Literal["fxpart-plan"] = "fxpart-plan"
    version: int = VERSION
    model: PlanModel
    cluster: Cluster
    cluster_hash: str
    mesh: dict[str, int]
    stages: tuple[Stage, ...]
    ties: tuple[Tie, ...]
    batch_size: int
    microbatches: int
    schedule: Literal["gpipe", "1f1b"]
    weights: Literal["flush"] = "flush"
    optimizer: str = "adamw"
    seed: int = 0
    prediction: Prediction
    provenance: dict[str, str]
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    constraints: dict[str, int | float | str | bool]
