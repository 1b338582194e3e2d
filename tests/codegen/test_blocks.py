"""Stages whose blocks are methods of their own: the same numbers, kept or made again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from live_bytes import live
from stage_runs import assigned, captured_of, prepared
from torch import nn
from zoo import ZOO

import fxpart
from fxpart.codegen.materialization import materialize
from fxpart.codegen.module_emitter import emit, split_recompute_segments
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import split
from fxpart.runtime.executor.recompute import StageRecomputation

pytestmark = pytest.mark.slow

QUICK = ("mlp", "dropouts", "in_place")


def trained(name: str, mode: str, plan: Any = None) -> Any:
    """Two steps on two stages: the plan, losses and state, and the stages' recomputation."""
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    torch.manual_seed(0)
    built = entry.build()
    given: dict[str, Any] = {"microbatches": built.batch_size, "constraints": {"stages": 2}}
    if plan is not None:
        stages = tuple(msgspec.structs.replace(s, recompute=mode) for s in plan.stages)
        given = {"plan": msgspec.structs.replace(plan, stages=stages)}
    else:
        given["constraints"]["mesh"] = "none"
        given["batch_coupling"] = "per-microbatch"
    program = fxpart.compile(
        built.model, "local:2", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, **given,
    )  # fmt: skip
    trainer = program.trainer(torch.optim.AdamW)
    losses = [float(trainer.step(built.batch)) for _ in range(2)]
    (executors,) = next(iter(trainer.parts.engine._executors.values()))
    again = [t.keeping.recompute for e in executors for t in e._signatures.values()]
    return program.plan, losses, trainer.state_dict(), again


def equal(name: str) -> None:
    plan, losses, state, none = trained(name, "none")
    assert none == [None] * len(none)
    for mode in ("full", "selective"):
        _, found, other, again = trained(name, mode, plan)
        assert found == losses
        assert all(torch.equal(state[n], t) for n, t in other.items())
        assert all(a.mode == mode and a.times for a in again if a._pieces)


@pytest.mark.parametrize("name", QUICK)
def test_small_models(name: str) -> None:
    equal(name)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet50", "unet", "lstm", "many_ways"])
def test_models(name: str) -> None:
    if name not in ZOO:
        pytest.skip("not in the zoo")
    equal(name)


class Mlp(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stage_of(width: int = 32, depth: int = 4) -> Any:
    """The graph of one stage with a block for each layer, and its text in blocks."""
    model, x = Mlp(width, depth), torch.randn(64, width)
    captured = captured_of(model, (x,))
    _, (stage,) = split(assigned(prepared(captured), [0]), captured)
    return captured, stage


def test_pieces_cover_all_operations_once() -> None:
    """In order; each takes what others make and gives what others use; the text is stable."""
    _, stage = stage_of()
    pieces = split_recompute_segments(stage.graph)
    ops = [n for n in stage.graph.nodes if n.op in ("call_function", "call_method")]
    assert [n for piece in pieces for n in piece.ops] == ops
    known = set(stage.graph.find_nodes(op="placeholder"))
    for piece in pieces:
        assert set(piece.takes) <= known
        known |= set(piece.gives)
    text = emit(stage, blocks=True)
    assert text == emit(stage, blocks=True)
    assert text.count("def block_") == len(pieces) >= 4
    assert "def block_" not in emit(stage)


def test_a_stage_keeps_what_lies_between_blocks() -> None:
    """Memory after the forward, and while one block at a time runs again."""
    captured, stage = stage_of(width=64, depth=6)
    spec, _ = split(assigned(prepared(captured), [0]), captured)
    module = load_stage(emit(stage, blocks=True), stage.spec)
    materialize(module, spec, captured.state)
    x = torch.randn(512, 64)
    held = {}
    for blocks in (False, True):
        again = StageRecomputation(module, "full")
        vars(module)["call"] = again.call if blocks else lambda piece, *given: piece(*given)
        for _ in range(3):
            start = live()
            (loss,) = module(0, x)
            held[blocks] = live() - start
            loss.backward()
            module.zero_grad()
    assert held[True] < 0.5 * held[False], held
