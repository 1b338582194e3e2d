"""Local graphs as programs: stages of all mesh ranks, in threads, against the whole graph."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from fxpart.passes import all_passes
from fxpart.passes.annotate import AnnotatePass
from fxpart.passes.lower import LowerPass
from fxpart.passes.propagate import PropagatePass
from local_runs import cut, homes_of, join, run_whole
from stage_runs import Stages, assigned
from torch import fx
from zoo_graphs import captured, inputs, prepared

from fxpart.codegen.local_capture import build_local_capture, sharding_spec
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_split import split
from fxpart.collectives import Communicator, InProcessHub
from fxpart.compiler import BLOCKS_KEY, PassManager
from fxpart.sharding import PARTIAL, Mesh, parse_placements

pytestmark = pytest.mark.slow

MESH = "dp=2,tp=2"
SEEDS = {
    "gpt2": {
        "*.c_attn.weight": "tp:S(1,3)", "*.attn.c_proj.weight": "tp:S(0)",
        "*.c_fc.weight": "tp:S(1)", "*.mlp.c_proj.weight": "tp:S(0)",
    },
    "llama": {
        "*.[qkv]_proj.weight": "tp:S(0)", "*.o_proj.weight": "tp:S(1)",
        "*.gate_proj.weight": "tp:S(0)", "*.up_proj.weight": "tp:S(0)",
        "*.down_proj.weight": "tp:S(1)",
    },
}  # fmt: skip


@cache
def local(name: str, mesh_rank: int) -> fx.GraphModule:
    """A zoo model's graph on a mesh rank: rows over dp, Megatron's weights over tp."""
    seeds = json.dumps({"input:*": "dp:S(0)", **SEEDS[name]})
    aliases = json.dumps(dict(captured(name).aliases))
    passes = [
        AnnotatePass(MESH, seeds, aliases),
        PropagatePass(),
        LowerPass(mesh_rank=str(mesh_rank)),
    ]
    return PassManager(all_passes()).run(passes, prepared(name))


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_stages_of_all_lanes(name: str) -> None:
    """Three stages: loss and gradients are those of the whole graph."""
    found, mesh, data = captured(name), Mesh.parse(MESH), inputs(name)
    mesh_rank = local(name, 0)  # the mesh ranks' graphs are the same: all cuts are even
    blocks = len(mesh_rank.meta[BLOCKS_KEY])
    graph = assigned(mesh_rank, (0, blocks // 3, 2 * blocks // 3))
    spec = sharding_spec(found, mesh_rank)
    users = list(mesh_rank.graph.find_nodes(op="placeholder"))[1:]

    def one(mine: Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mine_of = {n: parse_placements(s.placements, mesh) for n, s in spec.state.items()}
        state = {n: cut(found.state[n], p, mesh, mine.mesh_rank) for n, p in mine_of.items()}
        for n in state:
            state[n].requires_grad_(found.state[n].requires_grad)
        stages = Stages(
            replace(build_local_capture(found, graph), state=found.state | state), graph
        )
        for module in stages.modules:
            module.mesh = mine
        given = [
            cut(t, homes_of(n), mesh, mine.mesh_rank) for t, n in zip(data, users, strict=True)
        ]
        loss = stages.run(given, 7)[stages.spec.loss]
        assert len(stages.spec.stages) == 3
        return loss.detach(), stages.gradients()

    done = InProcessHub(mesh, timeout=60.0).run(one)
    wanted = run_whole(prepared(name), found.state, data, 7)
    for loss, _ in done:
        torch.testing.assert_close(loss, wanted.loss.detach(), rtol=1e-6, atol=0.0)
    assert wanted.gradients.keys() == done[0][1].keys()
    for n, gradient in wanted.gradients.items():
        state = spec.state[n]
        sums = tuple(
            PARTIAL if axis in state.partial else p
            for axis, p in zip(mesh.names, parse_placements(state.placements, mesh), strict=True)
        )
        whole = torch.zeros_like(gradient)
        whole += join([g[n] for _, g in done], sums, mesh, state.shape, rtol=1e-4)
        assert float((whole - gradient).abs().max()) <= 2e-5 * float(gradient.abs().max()), n


def test_specs_of_a_lane() -> None:
    """The mesh rank's program has local shapes; the sharding has the whole ones; text is the
    same."""
    found = captured("gpt2")
    graph = assigned(local("gpt2", 0), (0,))
    mesh_rank = build_local_capture(found, graph)
    sharding = sharding_spec(found, graph, 1, "dp")
    program, stages = split(graph, mesh_rank, sharding=sharding)
    assert program.sharding is sharding and (sharding.zero, sharding.zero_axis) == (1, "dp")
    assert sharding.inputs == found.inputs
    assert sharding.placements["input_ids"] == "dp:S(0)"
    assert mesh_rank.batch_size * 2 == found.batch_size
    name = "transformer.h.0.attn.c_attn.weight"
    held = next(s for s in program.stages[0].state if s.name == name)
    width, three = found.state[name].shape
    assert held.shape == (width, three // 2)
    assert sharding.state[name].shape == (width, three)
    assert sharding.state[name].placements == "tp:S(1,3)"
    assert sharding.state[name].partial == ("dp",)
    text = emit(stages[0])
    assert "from fxpart import collectives\n" in text
    assert "self.mesh = None" in text
    assert "collectives.all_reduce(self.mesh, " in text
    again = split(assigned(local("gpt2", 3), (0,)), mesh_rank, sharding=sharding)[1]
    assert emit(again[0]) == text, "even cuts give every mesh rank the same program"


def test_unsharded_programs_know_no_mesh() -> None:
    graph = assigned(prepared("mlp"), (0,))
    text = emit(split(graph, captured("mlp"))[1][0])
    assert "mesh" not in text and "collectives" not in text
