"""The CostModel protocol: costs, operators as a cost model sees them, and knowledge of devices.

A cost model is a class that derives from `CostModel` and defines a name, `op`, `reshard` and
`transfer`. Everything else has a default: a model without measurements knows nothing beside its
formulas. No module of fxpart asks for the class of a cost model. This module does not import torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing import Self

    import sympy

    from fxpart.cluster.devices import Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costmodels.profile_store import ContentionProfile, StageMeasurement, TrialRun

    Size: TypeAlias = int | sympy.Expr


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape (numbers or expressions in the graph's symbols) and dtype ("float32").

    layout: "" where it is row-major. Otherwise the dims from the outermost to the innermost in
    memory, without those of size 1: "0.2.1" is a transposed tensor, "0x3.1" a piece of rows that
    are 3 times as long, "~0.1" a tensor that is broadcast along dim 0. It holds at any size.
    """

    shape: tuple[Size, ...]
    dtype: str
    layout: str = ""


@dataclass(frozen=True)
class OpSpec:
    """One op on local shapes.

    name: the ATen name, "aten.addmm.default". inputs, outputs: tensors in argument order, nested
    lists flattened. attributes: other arguments by position ("3") or name, as hashable values.
    gradients: how many of the inputs need a gradient (0 means no backward). gradient_inputs: their
    positions in ``inputs``; where it is empty the first ``gradients`` inputs are meant.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[tuple[str, object], ...] = ()
    gradients: int = 0
    gradient_inputs: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The name that rules go by: "addmm" for aten.addmm_.default, "x.f" for others' ops."""
        return _key_of(self.name)

    def needs(self, position: int) -> bool:
        """Return whether the input at ``position`` needs a gradient."""
        if self.gradient_inputs:
            return position in self.gradient_inputs
        return position < self.gradients

    def attribute(self, *names: str) -> object:
        """Return the first attribute among the names or positions; None if there is none."""
        return next((value for key, value in self.attributes if key in names), None)


@lru_cache(maxsize=4096)
def _key_of(name: str) -> str:
    namespace, _, rest = name.partition(".")
    base = rest.split(".")[0] if rest else namespace
    base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    return base if namespace == "aten" or not rest else f"{namespace}.{base}"


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes moved of something, and whether it was measured or came from a formula."""

    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    source: str = "analytic"


@dataclass(frozen=True)
class DeviceKnowledge:
    """What a cost model knows of a device beside the costs of operators and transfers.

    factors: for each class of work ("matmul forward", "optimizer"), how many times longer it takes
    within a stage than alone; empty without a calibration. action: seconds that the runtime needs
    for each forward and backward of a microbatch; step: seconds that it needs per step. slowdown:
    how many times longer everything takes while all ranks of the device's host compute.
    contention: how ranks of the device's host slow each other down, and the memory of their
    processes; None if it was not measured. With it, plans are compared by simulated step time.
    stages: measured stages by stage key (:mod:`fxpart.codegen.stage_key`), alone on the device.
    trial_runs: plans that were run on the cluster, by plan key
    (:func:`fxpart.planner.prediction.plan_digest.plan_key`).
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    action: float = 0.0
    step: float = 0.0
    slowdown: float = 1.0
    contention: ContentionProfile | None = None
    stages: Mapping[str, StageMeasurement] = field(default_factory=dict)
    trial_runs: Mapping[str, TrialRun] = field(default_factory=dict)


NO_KNOWLEDGE = DeviceKnowledge()


class CostModel(Protocol):
    """Costs of operators, resharding and transfers, and knowledge of devices.

    Every answer is finite, not negative and deterministic.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name under which plans and messages mention the model."""

    @abstractmethod
    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        """Return the cost of the op's forward, or its backward, on concrete local shapes."""

    @abstractmethod
    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """Return the cost of a change of placement of a tensor of ``size`` bytes in all.

        Placements are "replicate", "partial" and "shard(dim)"; an unchanged placement is free.
        links: the group as a ring, from each rank to the next, one link for each rank.
        """

    @abstractmethod
    def transfer(self, size: float, link: Link) -> Cost:
        """Return the cost of sending ``size`` bytes over one link."""

    @classmethod
    def from_cluster(cls, cluster: Cluster | None) -> Self:
        """Return the model for a cluster; None: for no cluster in particular."""
        return cls()

    def for_model(self, fingerprint: str) -> CostModel:
        """Return the cost model with what it knows of the model with this fingerprint."""
        return self

    def for_part(self, cluster: Cluster) -> CostModel:
        """Return the cost model for a part of its cluster while all other devices are idle."""
        return self

    def knowledge(self, device: Device) -> DeviceKnowledge:
        """Return what is known of the device; nothing for a model without measurements."""
        return NO_KNOWLEDGE

    def provenance(self) -> dict[str, str]:
        """Return the sources of the model's numbers, as a plan lists them."""
        return {"transfers": self.name}
