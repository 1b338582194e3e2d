"""Totals of the batch as data: the operations that compute them from the user's inputs."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxpart.codegen.dataflow import format_node
from fxpart.codegen.size_expressions import dim_text, is_size
from fxpart.errors import FxpartError, error
from fxpart.passes.objective import OBJECTIVE_KEY, WEIGHT_KEY, TotalInputs
from fxpart.program.spec import ConstantTensor, TotalsSpec, TotalStep


def totals_of(graph: fx.GraphModule) -> TotalInputs | None:
    """Return the additional inputs of a divided graph; None for any other graph."""
    found = graph.meta.get(OBJECTIVE_KEY)
    assert found is None or isinstance(found, TotalInputs)
    return found


def totals_spec(totals: TotalInputs) -> TotalsSpec:
    """Return the totals as data; raise FXP108 for an unsupported operation or argument."""
    work = _TotalStepWriter(totals)
    for node in totals.graph.nodes:
        work.add(node)
    return TotalsSpec(
        inputs=tuple(work.inputs),
        steps=tuple(work.steps),
        constants=work.constants,
        results=tuple(work.results),
        names=totals.names,
        shares=dict(totals.shares),
    )


def weight_spec(captured: fx.GraphModule) -> TotalsSpec | None:
    """Return the computation of a batch's weight in a mean over batches; None to use its rows.

    The rows are also used if the weight needs an unsupported operation.
    """
    found = captured.meta.get(WEIGHT_KEY)
    if found is None:
        return None
    assert isinstance(found, TotalInputs)
    try:
        return totals_spec(found)
    except FxpartError:
        return None


class _TotalStepWriter:
    """Writes operations one after another; results are numbered."""

    def __init__(self, totals: TotalInputs) -> None:
        self.module = totals.module
        self.inputs: list[str] = []
        self.steps: list[TotalStep] = []
        self.constants: dict[str, ConstantTensor] = {}
        self.results: list[Any] = []
        self._written: dict[fx.Node, Any] = {}

    def add(self, node: fx.Node) -> None:
        """Write one node."""
        if node.op == "placeholder":
            self.inputs.append(node.name)
            self._written[node] = {"input": node.name}
        elif node.op == "get_attr":
            name = str(node.target)
            self.constants[name] = _constant(attrgetter(name)(self.module))
            self._written[node] = {"constant": name}
        elif node.op == "output":
            self.results = [self._argument(a, node) for a in node.args[0]]  # type: ignore[union-attr]
        elif is_size(node.meta.get("val")):
            self._written[node] = self._size(node.meta["val"])
        else:
            self._written[node] = {"value": len(self.steps)}
            self.steps.append(
                TotalStep(
                    target=_name(node),
                    args=[self._argument(a, node) for a in node.args],
                    kwargs={k: self._argument(v, node) for k, v in node.kwargs.items()},
                )
            )

    def _size(self, value: Any) -> Any:
        if isinstance(value, bool | int | float):
            return value
        return {"size": dim_text(value)}

    def _argument(self, value: Any, node: fx.Node) -> Any:
        if isinstance(value, fx.Node):
            return self._written[value]
        if isinstance(value, (list, tuple)):
            return [self._argument(item, node) for item in value]
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        raise error(
            "FXP108",
            where=format_node(node),
            why=f"the argument {value!r} cannot be written as data",
        )


def _name(node: fx.Node) -> str:
    if getattr(node.target, "__name__", "") == "getitem":
        return "getitem"
    name = str(node.target)
    if not isinstance(node.target, torch._ops.OpOverload) or not name.startswith("aten."):
        raise error(
            "FXP108",
            where=format_node(node),
            why="batch totals may use only aten operations",
        )
    return name


def _constant(tensor: torch.Tensor) -> ConstantTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ConstantTensor(dtype=dtype, values=tensor.detach().cpu().tolist())
