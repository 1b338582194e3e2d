"""The plan: every decision, its predicted cost, and the certificate of its optimality.

Nothing in a plan is ever executed. Reading, writing and checking are in ``fxpart.plan`` and do not
need torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError, Problem
from fxpart.plan.migration import VERSION
from fxpart.plan.offload import Offload
from fxpart.plan.prediction import HostLoad, PeakMemory, Prediction, RankPrediction
from fxpart.plan.staleness_penalty import ModeCandidate
from fxpart.plan.throughput import ModelWork
from fxpart.schedule.weight_modes import FLUSH

__all__ = [
    "VERSION",
    "Alternative",
    "Certificate",
    "Equivalence",
    "HostLoad",
    "ModuleCheck",
    "PeakMemory",
    "Plan",
    "PlanInput",
    "PlanModel",
    "PlanPlacement",
    "PlanSharding",
    "PlanTiedParameter",
    "Prediction",
    "RankPrediction",
    "Stage",
]  # fmt: skip


class _PlanStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: frozen, keyword-only, and strict about fields."""


class PlanInput(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input tensor: shape entries are numbers or symbols; batch_dim None means passed whole."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    batch_dim: int | None = None


class PlanModel(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that the plan is for.

    fingerprint: digest of the annotated graph (ops, shapes, state names, blocks). capture:
    "export", "export-strict" or "symbolic-trace". batch: "symbolic" or "fixed" (captured at the
    microbatch size). blocks: number of blocks of the graph. parameters: number of elements;
    parameter_bytes: bytes. work: what it computes; None in plans made before version 10.
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
    work: ModelWork | None = None


class Stage(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: blocks [first, last] (inclusive) on the given ranks, one per mesh coordinate.

    pieces: the first and last block of each virtual stage, from the first to the last; empty where
    the stage is contiguous. Blocks are positions in the plan's ``order``. data_parallel: number of
    parts of the batch; context_parallel: number of parts of its sequences; tensor_parallel: number
    of ranks that share each of these parts, so that the product is the number of ranks;
    expert_parallel: number of the batch's parts that share one set of experts. zero: ZeRO level (0
    to 3). shard_degree: under hybrid sharding the number of data-parallel ranks, consecutive along
    the axis dp_shard, that share one set of ZeRO's shards, of which the others have replicas; 0:
    all share one. device: the model of the ranks' devices, "" if not specified. parameters: number
    of unsharded elements.
    """

    index: int
    first: int
    last: int
    label: str
    ranks: tuple[int, ...]
    data_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    shard_degree: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    device: str = ""
    pieces: tuple[tuple[int, int], ...] = ()
    parameters: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the first and last block of each virtual stage: ``pieces``, or the only one."""
        return self.pieces or ((self.first, self.last),)


class PlanTiedParameter(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter used on several stages: names (main first), the owner, all its stages."""

    names: tuple[str, ...]
    owner: int
    stages: tuple[int, ...]


class Certificate(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good the plan is: the optimum of the objective is in [lower_bound, objective].

    gap: (objective - lower_bound) / objective. over: description of the search space of the bound.
    """

    status: Literal["optimal", "within gap", "best found"]
    objective: float
    lower_bound: float
    gap: float
    solver: str
    over: str


class PlanPlacement(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs, parameters and buffers, or ops that are sharded in one way for one reason.

    kind: "input", "state" or "op". names: of the model's inputs, of state (its main name), of the
    graph's nodes. placements: "dp:S(0),tp:R" of the value itself; of an op's results, separated by
    "; ", only where they differ from the op's sharding rule. strategy: for ops, the factor of the
    rule that each axis shards, "dp:b,tp:h". origins: by axis, the reason.
    """

    kind: Literal["input", "state", "op"]
    names: tuple[str, ...]
    placements: str = ""
    strategy: str = ""
    origins: dict[str, str] = {}


class PlanSharding(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of each stage share its work.

    mesh: "dp=2,tp=2" of every stage, with the first axis major; a stage of tensor degree 1 has one
    rank for all mesh ranks along "tp". zero: ZeRO level over ``zero_axis`` ("dp", or for 1 and 2
    also "dp,cp"): 1 shards optimizer state, 2 gradients too, 3 parameters too. placed: values and
    ops that are not replicated on every axis. unruled: ops without a sharding rule, which every
    rank computes whole, with their number. certificate: of the placements that annotations do not
    determine; None where there are none.
    """

    mesh: str
    zero: int = 0
    zero_axis: str = ""
    placed: tuple[PlanPlacement, ...] = ()
    unruled: dict[str, int] = {}
    certificate: Certificate | None = None


class Alternative(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rejected choice: its cost and the reason.

    step_seconds: None if it does not fit; then unfit_seconds is its cost with unlimited memory,
    None if not known. schedule and what (its degrees, or what it changes of the plan) are "" where
    not recorded.
    """

    stages: int
    microbatches: int
    step_seconds: float | None
    why: str
    schedule: str = ""
    what: str = ""
    unfit_seconds: float | None = None


class Equivalence(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the results of training by the plan relate to those of single-process training.

    promise: "bitwise" (identical in every bit), "rounding" (the same sums in another order), or
    "per microbatch" (the listed parts use each microbatch instead of the batch). reasons: one
    sentence for each cause of a promise other than "bitwise", such as "BatchNorm in layers.1".
    """

    promise: Literal["bitwise", "rounding", "per microbatch"]
    reasons: tuple[str, ...] = ()


class ModuleCheck(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the captured program was compared with the module as written at compile time.

    status: "passed", "skipped" (the check was too expensive or impossible), or "off" (the user
    switched it off). reason: why it was skipped, empty otherwise.
    """

    status: Literal["passed", "skipped", "off"]
    reason: str = ""


class Plan(_PlanStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All decisions for one model on one cluster, stored as canonical JSON.

    The text has neither time nor host of its creation.

    edges: (source, target, whether gradients return) for each pair of the program's stages (see
    ``program_stages``) with transfers for every microbatch, including skips; empty where each feeds
    the next.
    replicas: groups of stages that are replicas of one another, on their own devices of any kind,
    each as a round: microbatch m is computed by the stage at index m modulo the round's length, so
    that a faster replica occurs more often. A replica is a stage like any other; all of a group
    have the same blocks, one rank each, and all-reduce their gradients per step.
    staleness: where replicas take microbatches from queues instead of round-robin: by stage how
    many updates its gradients may miss, equal for all replicas of one. 0: it waits for each update,
    as a round-robin group does; above, it continues with the next minibatches. Empty: round-robin.
    schedule: the name of an entry of :data:`fxpart.schedule.spec.SCHEDULES`.
    weights: which weights forwards and backwards read, a mode of
    :mod:`fxpart.schedule.weight_modes`: one without flushes exactly with the schedule "async" or a
    staleness above 0.
    actions: for the schedule "found", which a solver found for these stages, the computations of
    each stage's ranks in order ("0F0 0F1 0B0"), by stage. precision: "bf16" where the model runs
    under autocast. transfer_dtype: the dtype in which floating-point values and gradients are sent
    between ranks; empty: no conversion. offload: what is in host memory: the optimizer's state,
    with the update on the host, or activations, or both.
    mesh: ranks by direction: "pipeline", and the mesh's axes by name ("data" and "tensor" where no
    axes are named); only "pipeline" where the stages' degrees differ or stages of one rank have
    replicas. It counts the replicas of a stage once. sharding: how the ranks of a stage share its
    work; None where a stage is one rank, or where it was not planned.
    devices: the cluster's devices that ranks 0, 1, ... run on, as ascending indices; empty for the
    first ones. order: the model's blocks in the order of the stages; empty for their own.
    alternatives: the best rejected choices; changes: this one with one decision changed.
    modes: what the mode "auto" compared by time to a target loss, best first; empty without a
    staleness penalty.
    equivalence: the promised relation to single-process training, None in plans made before version
    9. check: the comparison of the captured program with the module, None where none is recorded.
    certificate: of the cuts, for the selected degrees; degrees: of the degrees themselves, over the
    costs of single blocks; None where they were fixed.
    In a file ranks, devices and order are ranges: "0-7,16".
    """

    format: Literal["fxpart-plan"] = "fxpart-plan"
    version: int = VERSION
    model: PlanModel
    cluster: Cluster
    cluster_hash: str
    mesh: dict[str, int]
    stages: tuple[Stage, ...]
    ties: tuple[PlanTiedParameter, ...]
    batch_size: int
    microbatches: int
    schedule: str
    actions: tuple[str, ...] = ()
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    transfer_dtype: Literal["", "bfloat16"] = ""
    offload: Offload = "none"
    weights: str = FLUSH
    optimizer: str = "adamw"
    seed: int = 0
    prediction: Prediction
    provenance: dict[str, str]
    certificate: Certificate
    degrees: Certificate | None = None
    alternatives: tuple[Alternative, ...]
    changes: tuple[Alternative, ...] = ()
    modes: tuple[ModeCandidate, ...] = ()
    constraints: dict[str, int | float | str | bool]
    edges: tuple[tuple[int, int, bool], ...] = ()
    sharding: PlanSharding | None = None
    devices: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    staleness: tuple[int, ...] = ()
    equivalence: Equivalence | None = None
    check: ModuleCheck | None = None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Return the checked plan in a file.

        Raises FXP301 (unreadable file), FXP302 (unknown format) or FXP303 (invalid plan).
        """
        from fxpart.plan.files import load

        return load(Plan, Path(path))

    @staticmethod
    def loads(data: bytes | str, where: str = "plan") -> Plan:
        """Return the checked plan in JSON text; ``where`` names it in errors, as in ``load``."""
        from fxpart.plan.files import decode

        return decode(Plan, data.encode() if isinstance(data, str) else data, where)

    def dumps(self) -> str:
        """Return canonical JSON: sorted keys, two spaces, a final newline."""
        from fxpart.plan.files import encode

        return encode(self)

    def dump(self, path: str | Path) -> None:
        """Check the plan (FXP303) and write it to ``path`` (raises FXP603 where that fails)."""
        from fxpart.plan.files import dump

        dump(self, Path(path))

    def problems(self) -> tuple[Problem, ...]:
        """Return everything that is wrong with the plan; empty where it is valid."""
        from fxpart.plan.check import problems

        return problems(self)

    def validate(self) -> Plan:
        """Return the plan itself; raises FXP303 with every problem where it is not valid."""
        found = self.problems()
        if found:
            raise FxpartError(found)
        return self

    @staticmethod
    def schema() -> dict[str, Any]:
        """Return the JSON Schema (2020-12) of a plan file."""
        from fxpart.plan.files import schema

        return schema(Plan)

    @property
    def program_stages(self) -> tuple[tuple[int, int, int], ...]:
        """Return (first block, last block, index of its stage) of each stage of the program.

        One per stage; with virtual stages one for each of them, in the blocks' order.
        """
        found = [(first, last, s.index) for s in self.stages for first, last in s.spans]
        return tuple(sorted(found)) if self.virtual > 1 else tuple(found)

    @property
    def stage_edges(self) -> tuple[tuple[int, int, bool], ...]:
        """Return ``edges``, or where there are none the chain in which each stage feeds the next.

        With replicated stages all edges are listed; a single group has none.
        """
        if self.edges or self.replicas:
            return self.edges
        return tuple((i, i + 1, True) for i in range(len(self.program_stages) - 1))

    @property
    def firsts(self) -> tuple[int, ...]:
        """Return the stages without those that are replicas of an earlier one."""
        later = {copy for group in self.replicas for copy in group if copy != group[0]}
        return tuple(k for k in range(len(self.stages)) if k not in later)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return sum(len(stage.ranks) for stage in self.stages)

    @property
    def virtual(self) -> int:
        """Return the number of virtual stages per rank, 1 without virtual stages."""
        return max((len(stage.spans) for stage in self.stages), default=1)

    def device(self, rank: int) -> Device:
        """Return the device of a rank: the rank-th of those used, in the cluster's order."""
        return self.cluster.devices[self.devices[rank] if self.devices else rank]

    def __repr__(self) -> str:
        """Return a summary of at most 20 lines."""
        from fxpart.plan.summary import summarize

        return summarize(self)

    def _repr_html_(self) -> str:
        """Return the summary as HTML, for notebooks."""
        from fxpart.plan.summary import summarize_as_html

        return summarize_as_html(self)

    @property
    def runnable(self) -> tuple[str, ...]:
        """Return why this version cannot train by the plan, as sentences; empty if it can."""
        from fxpart.plan.runtime_support import reasons

        return reasons(self)
