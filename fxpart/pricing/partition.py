"""Price an annotated graph on a cluster: the partition problem from a torch graph."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart import costmodels
from fxpart.compat.optimizer_choice import choose
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.compiler.node_annotation import BlockInfo
from fxpart.errors import error
from fxpart.plan.offload import Offload
from fxpart.pricing.collective_traffic import CollectiveTransfer
from fxpart.pricing.device_groups import Rings, group_devices
from fxpart.pricing.device_limits import RESERVE, group_by_kind, limits
from fxpart.pricing.gradient_buckets import largest_bucket
from fxpart.pricing.graph_costs import GraphCosts, find_graph_costs
from fxpart.pricing.host_offload import HostOffload
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.recompute_costs import BlockForward
from fxpart.pricing.stage_parallelism import GradientReductionTimes, StageParallelism
from fxpart.pricing.variants import BatchSplit, Sizes, variants
from fxpart.pricing.weights import trained_names, weights
from fxpart.pricing.workspace import blocks_ahead
from fxpart.schedule.spec import DEFAULT_SCHEDULE, list_schedules
from fxpart.sharding import Mesh
from fxpart.solver.problem import (
    PartitionProblem,
    Recomputation,
    Recompute,
    Variant,
    Weight,
)

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel


def price(
    graph: fx.GraphModule,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    cost_model: str | CostModel = "auto",
    batch_size: int,
    microbatches: int | None = None,
    optimizer: object = "adamw",
    schedules: Sequence[str] = (DEFAULT_SCHEDULE,),
    others: Sequence[str] = (),
    min_stages: int = 1,
    max_stages: int | None = None,
    sharing: StageParallelism | None = None,
    transfer_dtype: str = "",
    recompute: Sequence[Recompute] = ("none",),
    offload: Offload = "none",
    known: dict[object, GraphCosts] | None = None,
) -> tuple[PartitionProblem, dict[str, str]]:
    """Return the partition problem of a graph on a cluster, and the sources of its costs.

    graph: with blocks and saved tensors (level ANNOTATED). batch_size: rows per step. microbatches:
    a number, or None to let the solver choose. optimizer: as for
    :func:`fxpart.compat.optimizer_choice.choose`. max_stages: None for as many as there are
    devices. sharing: where a stage is several ranks; the graph is then that of one rank, and the
    devices of the problem are groups of consecutive devices of the cluster. transfer_dtype: dtype
    in which float32 is sent between stages, "" for no conversion. recompute: the modes that
    stages may use. offload: what is in host memory. others: schedules allowed besides
    ``schedules``. known: costs of this graph that were found, to which new ones are added. Raises
    FXP105 (the batch), FXP109 (an argument) and FXP403 (no link).
    """
    model = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    blocks = _blocks_of(graph)
    trained = trained_names(captured) if captured.training else frozenset()
    shared = sharing or StageParallelism(Mesh())
    places = group_devices(cluster, shared.mesh.size)
    rings = Rings(cluster, shared.mesh)
    devices, _ = group_by_kind(places)
    own = [NonOpCosts.of(model, device) for device in devices]
    most = min(len(places.devices), len(blocks), max_stages or len(places.devices))
    cuts = variants(captured, _rows(captured, batch_size, shared, microbatches), microbatches, most)
    host, found = HostOffload.of(offload, cluster), choose(optimizer)
    whole = tuple(map(host.weight, weights(graph.graph, captured, trained, found)))
    state = tuple(map(shared.divided, whole))
    modes: tuple[Recompute, ...] = tuple(recompute) if captured.training else ("none",)
    names = (*_schedules(schedules), *others)
    costs = find_graph_costs(
        known, graph, trained, shared.mesh, transfer_dtype, names, modes, blocks_ahead(cluster)
    )
    pricer = _Pricer(costs, model, own, whole, largest_bucket(whole, shared), rings, host)
    copying = max(each.copying for each in own)
    times = shared.compute_reduction_times(whole, len(blocks), model, rings, copying)
    problem = PartitionProblem(
        blocks=tuple(block.name for block in blocks),
        devices=tuple(limits(places, model)),
        values=costs.values,
        weights=state,
        variants=tuple(pricer.variant(s, costs.sizes(captured, s, shared.parts)) for s in cuts),
        step=tuple(
            tuple(map(add, each.updates(state, len(blocks)), times.by_block)) for each in own
        ),
        once=times.once + max(each.step for each in own),
        action=max(each.action for each in own),
        no_cut_after=tuple(graph.meta.get(NO_CUT_KEY, ())),
        schedules=_schedules(schedules),
        min_stages=min_stages,
        max_stages=max(most, 1),
        packed=pricer.packed,
        recompute=modes,
        offloads=host.others,
    )
    return problem, _provenance(model, cluster, found.name, captured, pricer)


def compute_reduction_times(
    graph: fx.GraphModule,
    captured: CapturedModel,
    cluster: Cluster,
    cost_model: str | CostModel,
    sharing: StageParallelism,
) -> GradientReductionTimes:
    """Return the times per step of gradient reduction and of ZeRO's collectives, in seconds.

    They are part of the problem's ``step`` and ``once``; arguments as for :func:`price`.
    """
    model = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    trained = trained_names(captured) if captured.training else frozenset()
    whole = weights(graph.graph, captured, trained, choose("sgd"))
    count = len(graph.meta[BLOCKS_KEY])
    devices, _ = group_by_kind(group_devices(cluster, sharing.mesh.size))
    copying = max(NonOpCosts.of(model, device).copying for device in devices)
    return sharing.compute_reduction_times(
        whole, count, model, Rings(cluster, sharing.mesh), copying
    )


def _blocks_of(graph: fx.GraphModule) -> Sequence[BlockInfo]:
    """Return the descriptions of the graph's blocks; FXP201 where it has none."""
    blocks: Sequence[BlockInfo] = graph.meta.get(BLOCKS_KEY) or ()
    if not blocks:
        raise error(
            "FXP201",
            where="price",
            why="the graph has no blocks, so there is nothing to cut",
            fix="run the passes of fxpart.passes.PREPARE on it first",
        )
    return blocks


def _rows(
    captured: CapturedModel, batch: int, sharing: StageParallelism, microbatches: int | None
) -> int:
    """Return the rows per step on one rank; FXP105 where the ranks cannot share them evenly.

    A graph with a fixed batch keeps all: its sizes are one rank's already.
    """
    if batch % sharing.multiple:
        raise error(
            "FXP105",
            where=f"batch of {batch}, mesh {sharing.mesh}",
            why=f"{sharing.multiple} ranks require equal parts of every microbatch",
            fix=f"use a batch that {sharing.multiple} divides, or another mesh",
        )
    rows = batch // sharing.rows if captured.symbolic else batch
    if sharing.rows > 1 and microbatches is not None and rows < microbatches <= batch:
        raise error(
            "FXP105",
            where=f"batch of {batch}, mesh {sharing.mesh}, {microbatches} microbatches",
            why=f"each of {sharing.rows} ranks has {rows} rows, and every microbatch needs at "
            "least one row of each rank",
            fix=f"use a batch of at least {microbatches * sharing.rows} rows, fewer "
            "microbatches, or another mesh",
        )
    return rows


def _schedules(names: Sequence[str]) -> tuple[str, ...]:
    """Return the schedules of these names; raises FXP109 for unknown ones and for none."""
    known = list_schedules(chooses_cuts=True)
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise error(
            "FXP109",
            where=f"schedules={tuple(names)!r}",
            why=f"there is no schedule {wrong[0]!r} for cuts" if wrong else "no schedule is given",
            fix=f"use some of {', '.join(known)}",
        )
    return tuple(names)


class _Pricer:
    """The costs of one graph on a cluster, evaluated at each microbatch size."""

    def __init__(
        self,
        costs: GraphCosts,
        model: CostModel,
        own: Sequence[NonOpCosts],
        state: Sequence[Weight],
        packed: int,
        rings: Rings,
        host: HostOffload,
    ) -> None:
        self.costs, self.model, self.own, self.host = costs, model, own, host
        self.blocks, self.packed = costs.blocks, packed
        self.sources: set[str] = set()
        self.unknown: set[str] = set()
        self._collectives: dict[tuple[str, str, float, tuple[str, ...]], float] = {}
        self._rings = rings
        self._state = tuple(state)

    def variant(self, split: BatchSplit, sizes: Sizes) -> Variant:
        """Return all costs at one microbatch size; workspaces include packed gradients."""
        rows = [self._seconds(sizes, own, split.microbatches) for own in self.own]
        activation = tuple(sum(map(sizes.number, row)) for row in self.costs.saved)
        workspace = tuple(self.packed + size for size in self.costs.workspace.bytes(sizes))
        again: tuple[Recomputation, ...] = ()
        if self.costs.recompute is not None:
            forward = [self._block_forwards(sizes, own) for own in self.own]
            collective = self._collective_seconds(sizes, backward=False)
            again = self.costs.recompute.price(
                sizes, forward, collective, self.costs.workspace, self.packed
            )
        pairs = zip(self.own, rows, strict=True)
        variant = Variant(
            microbatch_size=split.size,
            microbatches=split.microbatches,
            forward=tuple(forward for forward, _ in rows),
            backward=tuple(backward for _, backward in rows),
            activation=activation,
            workspace=workspace,
            largest=max(
                (sizes.number(size) for row in self.costs.saved for size in row), default=0
            ),
            value_bytes=tuple(map(sizes.number, self.costs.value_bytes)),
            collective=self._collective_seconds(sizes),
            recompute=again,
            split=None
            if self.costs.split is None
            else self.costs.split.price(sizes, [(own.device, back) for own, (_, back) in pairs]),
        )
        self.unknown |= sizes.unknown
        return self.host.variant(variant, [own.device for own in self.own])

    def _seconds(
        self, sizes: Sizes, own: NonOpCosts, microbatches: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return forward and backward seconds by block on one device; equal ops are priced once."""
        costs = [
            [self.model.op(sizes.op(op), own.device, backward) for op in self.costs.ops]
            for backward in (False, True)
        ]
        self.sources |= {cost.source for row in costs for cost in row}
        forward, backward = (self._by_block([cost.seconds for cost in row]) for row in costs)
        for block, moved in self.costs.moves:
            ahead, back = (own.copying * float(sizes.number(size)) for size in moved.copied)
            forward[block] += ahead + sum(self._move(move, sizes) for move in moved.forward)
            backward[block] += back + sum(self._move(move, sizes) for move in moved.backward)
        backward = backward + own.accumulation(self._state, self.blocks, microbatches)
        return tuple(map(float, forward)), tuple(map(float, backward))

    def _block_forwards(self, sizes: Sizes, own: NonOpCosts) -> list[BlockForward]:
        """Return the parts of each block's forward seconds on one device."""
        costs = [self.model.op(sizes.op(op), own.device, False).seconds for op in self.costs.ops]
        ops: list[dict[fx.Node, float]] = [{} for _ in range(self.blocks)]
        for node, op, block in zip(
            self.costs.nodes, self.costs.node_op, self.costs.node_block, strict=True
        ):
            ops[block][node] = costs[op]
        sent = [0.0] * self.blocks
        for block, moved in self.costs.moves:
            sent[block] += own.copying * float(sizes.number(moved.copied[0]))
            sent[block] += sum(self._move(move, sizes) for move in moved.forward)
        return [BlockForward(*each) for each in zip(ops, sent, strict=True)]

    def _collective_seconds(self, sizes: Sizes, *, backward: bool = True) -> tuple[float, ...]:
        """Return the seconds of collectives by block, equal for all kinds of devices.

        backward: include those of the backward.
        """
        found = [0.0] * self.blocks if self.costs.moves else []
        for block, moved in self.costs.moves:
            all_ = (*moved.forward, *(moved.backward if backward else ()))
            found[block] += sum(self._move(move, sizes) for move in all_)
        return tuple(found)

    def _move(self, move: CollectiveTransfer, sizes: Sizes) -> float:
        key = (move.source, move.target, float(sizes.number(move.size)), move.axes)
        if key not in self._collectives:
            cost = self.model.reshard(*key[:3], self._rings(*move.axes))
            self.sources.add(cost.source)
            self._collectives[key] = cost.seconds
        return self._collectives[key]

    def _by_block(self, seconds: list[float]) -> NDArray[np.float64]:
        each = np.array(seconds)[self.costs.node_op] if self.costs.node_op else np.zeros(0)
        total = np.zeros(self.blocks)
        np.add.at(total, self.costs.node_block, each)
        return total


def _provenance(
    model: CostModel, cluster: Cluster, optimizer: str, captured: CapturedModel, pricer: _Pricer
) -> dict[str, str]:
    """Return the source of each kind of cost, for the plan."""
    batch = "symbolic batch" if captured.symbolic else f"batch fixed at {captured.batch_size}"
    result = {
        "activations": f"counted from the captured graph, {batch}",
        "compute": "; ".join(sorted(pricer.sources)) or model.name,
        "devices": "; ".join(sorted({d.source or "as specified" for d in cluster.devices})),
        "links": "; ".join(sorted({link.origin or "as specified" for link in cluster.links})),
        "memory": f"{RESERVE:.0%} of each device reserved",
        "optimizer": f"{optimizer}, one step on parameters of the same shapes",
        **model.provenance(),
    }
    if source := pricer.host.source:
        result["offload"] = source
    if pricer.unknown:
        names = ", ".join(sorted(pricer.unknown))
        result["sizes"] = f"only known at run time, assumed to be the microbatch size: {names}"
    return result
