"""Find the parts of parameters that an optimizer updates as it updates the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.compat.optimizer_choice import Shape, choose
from fxpart.compat.optimizer_trial import (
    NOT_STEPPED,
    ParameterSplit,
    find_difference,
    shrink_shape,
)

# Each element of a parameter is updated from only its own gradient and state.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
    "Rprop", "SparseAdam",
)  # fmt: skip


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is known as element-wise or has ``elementwise = True``."""
    kind = type(optimizer)
    if getattr(kind, "elementwise", False):
        return True
    return any(kind is getattr(torch.optim, name, None) for name in ELEMENTWISE)


@dataclass(frozen=True)
class OptimizerParts:
    """The parts of parameters that ranks may update separately.

    whole: parameters of which no range of the flattened tensor may be updated alone, as ZeRO 1 and
    2 do, with the optimizer's class. dims: the dims along which these may be sharded. apart: the
    class of an optimizer whose parameters must all be on one rank, "" if there is none.
    """

    whole: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, frozenset[int]] = field(default_factory=dict)
    apart: str = ""

    def describe(self) -> dict[str, str]:
        """Return what the planner does not search, for the explanation of a plan."""
        kinds = ", ".join(sorted({*self.whole.values()}))
        if not kinds:
            return {}
        found = "no dim" if not any(self.dims.values()) else "some dims only"
        stages = "; all parameters are on one stage" if self.apart else ""
        return {
            "optimizer": f"{kinds} updates parts differently from whole parameters: ZeRO 1 and 2 "
            f"are not used, and {found} of its parameters may be sharded{stages}"
        }

    def may_shard(self, name: str, dim: int) -> bool:
        """Return whether a parameter may be sharded along a dim."""
        return name not in self.whole or dim in self.dims[name]


ANY_PARTS = OptimizerParts()  # each element is updated independently


def find_optimizer_parts(optimizer: object, shapes: Mapping[str, Shape]) -> OptimizerParts:
    """Step the requested optimizer on small tensors, whole and in parts, and compare.

    shapes: of the trained parameters, by name. An optimizer that cannot be created here is left to
    the trainer, which checks it again.
    """
    choice = choose(optimizer)
    if any(choice.make is getattr(torch.optim, name, None) for name in ELEMENTWISE):
        return ANY_PARTS
    named = {
        name: torch.nn.Parameter(torch.zeros((), dtype=dtype).expand(shrink_shape(shape)))
        for name, (shape, dtype) in shapes.items()
    }
    try:
        made = choice.make([*named.items()] if choice.parts else [*named.values()])  # type: ignore[list-item]
    except Exception:  # User code may raise any exception.
        return ANY_PARTS
    if not isinstance(made, torch.optim.Optimizer):
        return ANY_PARTS
    names = {id(parameter): name for name, parameter in named.items()}
    whole: dict[str, str] = {}
    dims: dict[str, frozenset[int]] = {}
    apart = ""
    for each in made.each if isinstance(made, MultiOptimizer) else (made,):
        if is_elementwise(each):
            continue
        kind = type(each).__name__
        mine = {names[id(p)]: p for g in each.param_groups for p in g["params"] if id(p) in names}
        why = find_difference(each, names, None)
        if why.startswith(NOT_STEPPED):
            continue  # such as for LBFGS, which needs a closure and is rejected for that
        apart = apart or (kind if why else "")
        for some in _group_by_dims(mine):
            if _differs(each, names, some, ParameterSplit(flat=2)):
                count = mine[some[0]].dim()
                kept = frozenset(
                    dim
                    for dim in range(count)
                    if not _differs(each, names, some, ParameterSplit(dims=((dim, 2),)))
                )
                whole |= dict.fromkeys(some, kind)
                dims |= dict.fromkeys(some, kept)
    return OptimizerParts(whole, dims, apart)


def _group_by_dims(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the names of parameters with dims, by their number of dims."""
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(parameter.dim(), []).append(name)
    yield from (names for count, names in groups.items() if count)


def _differs(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    some: Sequence[str],
    split: ParameterSplit,
) -> bool:
    """Return whether some parameters are updated differently in parts."""
    return bool(find_difference(optimizer, names, dict.fromkeys(some, split)))
