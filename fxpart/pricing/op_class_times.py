"""Predicted times of stages by class of op, to which calibration is fitted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from fxpart.compat.optimizer_choice import choose
from fxpart.compiler import BLOCKS_KEY
from fxpart.compiler.collective_calls import is_collective
from fxpart.costmodels.op_classes import CALL, CALLS, op_class
from fxpart.pricing.non_op_costs import gradient_parts
from fxpart.pricing.optimizer_step import update_parts
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import BatchSplit, Sizes
from fxpart.pricing.weights import trained_names, weights

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.cluster.devices import Device
    from fxpart.costs import CostModel, OpSpec


@dataclass(frozen=True)
class _Op:
    block: int
    spec: OpSpec
    kind: str


class OpClassTimes:
    """Seconds by class and direction of stages of one graph, by a cost model.

    The names are those of calibrations: "matmul forward".
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        captured: CapturedModel,
        model: CostModel,
        device: Device,
        optimizer: object,
    ) -> None:
        """Describe the ops. graph: with blocks. model: without factors, for an idle device."""
        self._captured, self._model, self._device = captured, model, device
        trained = trained_names(captured) if captured.training else frozenset[str]()
        specs = Specs(trained)
        self._ops: list[_Op] = []
        for node in graph.graph.nodes:
            block = annotation(node).block
            if block is None or is_collective(node.target):
                continue
            spec = specs.op(node)
            if spec is not None:
                self._ops.append(_Op(block, spec, op_class(spec)))
        self._weights = weights(graph.graph, captured, trained, choose(optimizer))
        self.blocks = len(graph.meta[BLOCKS_KEY])
        self._tables: dict[int, list[dict[str, float]]] = {}

    def __call__(
        self, first: int, last: int, rows: int, *, later: bool, microbatches: int
    ) -> dict[str, float]:
        """Return the seconds of blocks first to last for a microbatch of ``rows`` rows.

        later: the microbatch accumulates to the gradients of earlier ones. The optimizer step is
        after ``microbatches`` of these rows.
        """
        total: defaultdict[str, float] = defaultdict(float)
        for row in self._by_block(rows)[first : last + 1]:
            for name, seconds in row.items():
                total[name] += seconds
        weights_of_stage = [w for w in self._weights if any(first <= b <= last for b in w.blocks)]
        share = rows / max(1, self._captured.batch_size)
        update = update_parts(weights_of_stage, microbatches * share, microbatches)
        return {**total, **gradient_parts(weights_of_stage, later), **update}

    def _by_block(self, rows: int) -> list[dict[str, float]]:
        if rows not in self._tables:
            sizes = Sizes(self._captured, BatchSplit(rows, 1))
            table: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(self.blocks)]
            for op in self._ops:
                spec = sizes.op(op.spec)
                for direction, back in (("forward", False), ("backward", True)):
                    if back and not spec.gradients:
                        continue
                    cost = self._model.op(spec, self._device, back)
                    table[op.block][f"{op.kind} {direction}"] += cost.seconds
                    table[op.block][f"{CALLS} {direction}"] += CALL
            self._tables[rows] = [dict(row) for row in table]
        return self._tables[rows]
