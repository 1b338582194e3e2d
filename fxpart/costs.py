"""What a cost is, what a cost model answers, and what an op looks like to it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import sympy

    from fxpart.cluster.model import Device, Link

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
        namespace, _, rest = self.name.partition(".")
        base = rest.split(".")[0] if rest else namespace
        base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
        return base if namespace == "aten" or not rest else f"{namespace}.{base}"

    def needs(self, position: int) -> bool:
        """Whether the input at ``position`` needs a gradient."""
        if self.gradient_inputs:
            return position in self.gradient_inputs
        return position < self.gradients

    def attribute(self, *names: str) -> object:
        """The first attribute of one of the names or positions; None where there is none."""
        return next((value for key, value in self.attributes if key in names), None)


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes moved of something, and whether it was measured or came from a formula."""

    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    source: str = "analytic"


class CostModel(Protocol):
    """Three pure questions; every answer finite, not negative and deterministic."""

    @property
    def name(self) -> str:
        """The name in the table; plans say it for each cost."""
        ...

    def op(self, op: OpSpec, device: Device, backward: bool) -> Cost:
        """The op's forward (or its backward) on concrete local shapes on the device."""
        ...

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        """A change of placement of a tensor of ``size`` bytes in all; identity is free.

        Placements are "replicate", "partial" and "shard(dim)". links: the group as a ring, from
        each rank to the next; so their number is that of the ranks.
        """
        ...

    def transfer(self, size: float, link: Link) -> Cost:
        """``size`` bytes over one link."""
        ...
