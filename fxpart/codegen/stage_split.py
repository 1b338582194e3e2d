"""Split an assigned graph into one graph per stage, and describe the whole program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.codegen.dataflow import GradientFlow, find_live_nodes, is_op, outputs_of, writes
from fxpart.codegen.identifiers import attributes, identifier
from fxpart.codegen.size_builder import readable
from fxpart.codegen.size_expressions import dim_text
from fxpart.codegen.stage_assignment import STAGES_KEY, check_stage_assignment, stages_of
from fxpart.codegen.stage_graph import BuiltStageGraph, StageSubgraph, build_graph
from fxpart.codegen.totals_spec import totals_of, totals_spec
from fxpart.compiler import BLOCKS_KEY, LEVEL_KEY, RNG_KEY, Level
from fxpart.compiler.duplicated_ops import add_duplicated_ops, find_duplicated_ops
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.sparse_lookups import sparse_tables
from fxpart.errors import error
from fxpart.program.spec import ProgramSpec, ShardingSpec, StageSpec, StateSpec, ValueSpec


@dataclass(frozen=True)
class StageGraph:
    """One stage: its call signature, and its ops as a graph.

    The graph's placeholders are the key and then ``spec.inputs`` in order; ``get_attr`` targets are
    original names; it returns a tuple of ``spec.outputs``. blocks: names of its blocks.
    """

    spec: StageSpec
    graph: fx.Graph
    blocks: tuple[str, ...]
    model: str


def split(
    graph: fx.GraphModule,
    captured: CapturedModel,
    seed: int = 0,
    *,
    keep_outputs: bool = False,
    sharding: ShardingSpec | None = None,
) -> tuple[ProgramSpec, tuple[StageGraph, ...]]:
    """Split an assigned graph into stages.

    Each op that the loss needs (with ``keep_outputs`` also the user's outputs) is on exactly one
    stage, or, if it is duplicated, on each stage that needs it. All other values are sent directly
    from their stage to each stage that uses them; sizes are rebuilt from shapes. sharding: of a
    rank-local graph, stored in the program. Raise FXP106 without a loss, FXP201 with every reason
    why the assignment is invalid.
    """
    if graph.meta.get(LEVEL_KEY) != Level.ASSIGNED:
        raise error("FXP900", where="split", why="the graph has no stage assignment")
    work = _StageSplitter(graph, captured, keep_outputs)
    parts = [work.part(index) for index in range(work.count)]
    owners = _holders(parts)
    built = tuple(work.stage(part, owners) for part in parts)
    held = set(owners)
    spec = ProgramSpec(
        inputs=captured.inputs,
        constants=captured.constants,
        symbols=dict(captured.symbols),
        stages=tuple(stage.spec for stage in built),
        loss=work.loss_name,
        outputs=work.output_names,
        ties={
            name: tuple(stages)
            for name, stages in owners.items()
            if len(stages) > 1 and name in captured.parameters
        },
        aliases=dict(captured.aliases),
        seed=seed,
        unused=tuple(name for name in captured.state if name not in held),
        model=captured.model_name,
        parameters=tuple(captured.parameters),
        sharding=sharding,
        totals=None if work.totals is None else totals_spec(work.totals),
    )
    return spec, built


class _StageSplitter:
    """Shared data of all stages: the stage of each op, and names of values that leave a stage."""

    def __init__(self, module: fx.GraphModule, captured: CapturedModel, keep_outputs: bool) -> None:
        self.graph = module.graph
        self.captured = captured
        self.block_names = [b.name for b in module.meta.get(BLOCKS_KEY, ())]
        self.stages = stages_of(self.graph)
        used = max(self.stages.values(), default=0) + 1
        self.count = max(used, module.meta.get(STAGES_KEY, 0))
        loss, *outputs = outputs_of(self.graph)
        kept = [o for o in outputs if isinstance(o, fx.Node)] if keep_outputs else []
        self.loss = loss if isinstance(loss, fx.Node) else None
        if self.loss is None and not kept:
            raise error(
                "FXP106", where="the captured graph", why="it returns no loss", fix="pass loss="
            )
        returned = [*([self.loss] if self.loss is not None else []), *kept]
        effects = writes(self.graph)
        self.written = frozenset(effects.touching)
        self.alive = find_live_nodes([*returned, *effects.writers])
        self.duplicated = find_duplicated_ops(self.graph)
        check_stage_assignment(self.stages, self.alive, effects, set(returned), self.duplicated)
        self.gradients = GradientFlow(self.graph, self.loss, self.alive, captured.state)
        self.sparse = sparse_tables(self.graph, self.alive.__contains__)
        self.totals = totals_of(module)
        self.inputs = self._inputs()
        # Prefer live inputs as sources of sizes.
        self.given = sorted(self.inputs, key=lambda n: n not in self.alive)
        self.ops = self._ops(set(returned))
        self.names = self._value_names(returned)
        self.returned: dict[int, list[fx.Node]] = {}
        for node in dict.fromkeys(returned):
            self.returned.setdefault(self.stages.get(node, 0), []).append(node)
        self.loss_name = self.names[self.loss] if self.loss is not None else ""
        self.output_names = tuple(self.names[node] for node in kept)

    def _ops(self, returned: set[fx.Node]) -> list[list[fx.Node]]:
        """Return the ops of each stage in order, with the duplicated ones that it needs."""
        assigned: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node, stage in self.stages.items():
            if node in self.alive:
                assigned[stage].append(node)
        order = {node: i for i, node in enumerate(self.stages)}
        return [
            sorted(
                add_duplicated_ops(ops, self.duplicated - returned.intersection(ops)),
                key=order.__getitem__,
            )
            for ops in assigned
        ]

    def _inputs(self) -> dict[fx.Node, str]:
        """Return the user's input nodes in order, then totals of the batch, with their names."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder" and n.name != RNG_KEY]
        count = len(self.captured.inputs)
        named = {n: spec.name for n, spec in zip(nodes[:count], self.captured.inputs, strict=True)}
        return named | {node: node.name for node in nodes[count:]}

    def _value_names(self, returned: Iterable[fx.Node]) -> dict[fx.Node, str]:
        """Name the values that may leave a stage; a returned input or weight gets a new name."""
        taken = set(self.inputs.values())
        names: dict[fx.Node, str] = {}
        for node in (*self.stages, *returned):
            if node not in names and node in self.alive:
                plain = is_op(node) and node.name not in taken
                names[node] = node.name if plain else identifier(f"{node.name}_output", taken)
                taken.add(names[node])
        return names

    def part(self, index: int) -> StageSubgraph:
        """Return the subgraph that stage ``index`` computes."""
        returned = self.returned.get(index, [])
        used = [a for n in self.ops[index] for a in n.all_input_nodes]
        used += [n for n in returned if n not in self.stages]
        mine = set(self.ops[index])
        crossing = [n for n in dict.fromkeys(used) if n in self.stages and n not in mine]
        order = {node: i for i, node in enumerate(self.graph.nodes)} if crossing else {}
        read = set(used)
        inputs = [n for n in self.inputs if n in read]
        gives: list[tuple[fx.Node, tuple[int, ...]]] = []
        for node in self.ops[index]:
            if node in self.duplicated:
                continue
            users = {self.stages[u] for u in node.users if u in self.stages and u in self.alive}
            if targets := sorted(users - {index}):
                gives.append((node, tuple(targets)))
        sent = {node for node, _ in gives}
        gives += [(node, ()) for node in returned if node not in sent]
        return StageSubgraph(
            index=index,
            ops=tuple(self.ops[index]),
            inputs=tuple(inputs),
            crossing=tuple(sorted(crossing, key=order.__getitem__)),
            outputs=tuple(gives),
            symbols=readable((n, n.meta["val"]) for n in self.given),
        )

    def stage(self, part: StageSubgraph, owners: dict[str, list[int]]) -> StageGraph:
        """Build the graph and the description of a stage."""
        crossing = build_graph(part)
        index = part.index
        ops = set(part.ops)
        inputs: list[ValueSpec] = []
        for node in crossing.inputs:
            wanted = node not in self.inputs and self.gradients.wanted(
                node, (u for u in node.users if u in ops)
            )
            inputs.append(_value(node, self.inputs.get(node) or self.names[node], wanted))
        outputs = []
        for node, targets in part.outputs:
            users = (u for u in node.users if self.stages.get(u) in targets)
            wanted = self.gradients.wanted(node, users) or (
                node is self.loss and self.gradients.requires(node)
            )
            outputs.append(_value(node, self.names[node], wanted))
        spec = StageSpec(
            index=index,
            inputs=tuple(inputs),
            sources=tuple(-1 if n in self.inputs else self.stages[n] for n in crossing.inputs),
            outputs=tuple(outputs),
            targets=tuple(targets for _, targets in part.outputs),
            state=self._state(crossing, owners),
            random_ops=sum(1 for n in part.ops if annotation(n).random is not None),
        )
        own = [annotation(n).block for n in part.ops if self.stages[n] == index]
        blocks = sorted({block for block in own if block is not None})
        labels = tuple(self.block_names[b] for b in blocks if b < len(self.block_names))
        return StageGraph(spec, crossing.graph, labels, self.captured.model_name)

    def _state(
        self, crossing: BuiltStageGraph, owners: dict[str, list[int]]
    ) -> tuple[StateSpec, ...]:
        captured = self.captured
        kinds = {name: _kind(name, captured) for name in crossing.state}
        escaped = attributes(kinds.items())
        return tuple(
            StateSpec(
                attribute=escaped[name],
                name=name,
                kind=kind,
                dtype=_dtype(captured.state[name]),
                shape=tuple(captured.state[name].shape),
                requires_grad=captured.state[name].requires_grad,
                persistent=kind == "parameter" or name in captured.persistent,
                owner=owners[name][0],
                sparse=kind == "parameter" and name in self.sparse,
                written=name in self.written,
            )
            for name, kind in kinds.items()
        )


def _kind(name: str, captured: CapturedModel) -> str:
    if name in captured.parameters:
        return "parameter"
    lifted = name.startswith("constant_") and name not in captured.persistent
    return "constant" if lifted else "buffer"


def _holders(parts: Iterable[StageSubgraph]) -> dict[str, list[int]]:
    """Return the stages that use each state tensor; the first is the owner."""
    holders: dict[str, list[int]] = {}
    for part in parts:
        for name in part.state:
            holders.setdefault(name, []).append(part.index)
    return holders


def _value(node: fx.Node, name: str, requires_grad: bool) -> ValueSpec:
    value: Any = node.meta["val"]
    return ValueSpec(
        name=name,
        dtype=_dtype(value),
        shape=tuple(dim_text(size) for size in value.shape),
        requires_grad=requires_grad,
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
