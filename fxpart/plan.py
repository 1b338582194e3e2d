"""The plan: every decision, what it is predicted to cost, and how good it is proved to be.

Nothing in a plan is ever executed. Reading, writing and checking live in ``fxpart.plan_io``; torch
is not needed for any of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from fxpart.cluster import Cluster
from fxpart.errors import FxpartError, Problem

VERSION = 2


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

    fingerprint: digest of the annotated graph (ops, shapes, state names, blocks). capture:
    "export", "export-strict" or "symbolic-trace". batch: "symbolic" or "fixed" (captured at the
    microbatch size). blocks: how many blocks the graph has. parameters: count of elements;
    parameter_bytes: bytes.
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
    """One stage: blocks [first, last] (inclusive) on the given ranks, one for each lane.

    data_parallel: how many parts the batch is cut into; tensor_parallel: the ranks that share each
    of these parts, so that the product is the number of ranks. parameters: elements, whole.
    """

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
    """What one rank is predicted to need.

    Seconds are per microbatch, except sync and optimizer, which are per step. Bytes at the peak.
    in_flight: microbatches whose activations are held at once.
    """

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
    """Step time in seconds: the closed form that was minimised, and the simulated schedule.

    bubble: the share of the simulated step in which the ranks idle, 0 to 1.
    """

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


class Placed(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs, parameters and buffers, or ops that are sharded in one way for one reason.

    kind: "input", "state" or "op". names: of the model's inputs, of state (its main name), of the
    graph's nodes. placements: "dp:S(0),tp:R" of the value itself; of an op's results, one after
    another with "; " between, only where they are not what the op's rule says. strategy: for ops,
    the factor of the rule that each axis cuts, "dp:b,tp:h". origins: by axis, where that came from.
    """

    kind: Literal["input", "state", "op"]
    names: tuple[str, ...]
    placements: str = ""
    strategy: str = ""
    origins: dict[str, str] = {}


class PlanSharding(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of each stage share its work.

    mesh: "dp=2,tp=2", the same for every stage: rank = stage * lanes + lane, lanes counted with the
    first axis major. zero: 0, or what is cut over ``zero_axis``: 1 optimizer state, 2 gradients
    too, 3 parameters too. placed: what is not replicated on every axis. unruled: ops without a
    rule, which every rank computes whole, with their number. certificate: of the choice of what
    annotations left open; None where nothing was chosen.
    """

    mesh: str
    zero: int = 0
    zero_axis: str = ""
    placed: tuple[Placed, ...] = ()
    unruled: dict[str, int] = {}
    certificate: Certificate | None = None


class Alternative(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rejected choice: its cost (None if it does not fit) and why it lost."""

    stages: int
    microbatches: int
    step_seconds: float | None
    why: str


class Plan(_Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All decisions for one model on one cluster; canonical JSON, no time and no host in it.

    edges: (source stage, target stage, whether gradients come back) for each pair of stages that
    exchanges values every microbatch, skips included; empty where each stage feeds the next.
    mesh: ranks by direction: "pipeline", and the mesh's axes by name ("data" and "tensor", both 1,
    where a stage is one rank). sharding: None where a stage is one rank.
    """

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
    edges: tuple[tuple[int, int, bool], ...] = ()
    sharding: PlanSharding | None = None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The checked plan in a file; FXP301 (unreadable), FXP302 (format) or FXP303 (content)."""
        from fxpart.plan_io.files import load

        return load(Path(path))

    @staticmethod
    def loads(data: bytes | str, where: str = "plan") -> Plan:
        """The checked plan in JSON text; ``where`` names it in errors, which are those of load."""
        from fxpart.plan_io.files import decode

        return decode(data.encode() if isinstance(data, str) else data, where)

    def dumps(self) -> str:
        """Canonical JSON: sorted keys, two spaces, a final newline; equal plans give equal text."""
        from fxpart.plan_io.files import encode

        return encode(self)

    def dump(self, path: str | Path) -> None:
        """Check the plan (FXP303) and write it to ``path`` (FXP603 where that fails)."""
        from fxpart.plan_io.files import dump

        dump(self, Path(path))

    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong with the plan; empty where it is valid."""
        from fxpart.plan_io.check import problems

        return problems(self)

    def validate(self) -> Plan:
        """The plan itself; raises FXP303 with every problem found where it is not valid."""
        found = self.problems()
        if found:
            raise FxpartError(found)
        return self

    @staticmethod
    def schema() -> dict[str, Any]:
        """The JSON Schema (2020-12) of a plan file."""
        from fxpart.plan_io.schema import schema

        return schema()

    @property
    def stage_edges(self) -> tuple[tuple[int, int, bool], ...]:
        """``edges``, or where there are none the chain in which each stage feeds the next."""
        return self.edges or tuple((i, i + 1, True) for i in range(len(self.stages) - 1))
