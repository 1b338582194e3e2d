"""Models with branches, planned as graphs of stages: their numbers are those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from branch_models import MODELS
from ranks import Pool
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import StagedGraph
from fxpart.codegen.mesh_programs.rank_programs import assign, generate
from fxpart.planner.plan_builder import make_plan
from fxpart.pricing.partition import price
from fxpart.program.edges import find_stage_edges
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate
from fxpart.solver.objective import evaluate as evaluate_chain
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.stage_graph.block_graph import BlockGraph, regroup
from fxpart.solver.stage_graph.objective import evaluate
from fxpart.solver.stage_graph.portfolio import solve_branches
from fxpart.solver.stage_graph.problem import StageGraphSolution
from fxpart.training.trainer_factory import load_trainer

STAGES, MICROBATCHES = 4, 4


@cache
def compiled(name: str) -> Program:
    """The model as a chain of two stages, captured once."""
    model, batch = MODELS[name]()
    return fxpart.compile(
        model, "local:2", example_kwargs=batch, microbatches=MICROBATCHES,
        constraints={"stages": 2},
    )  # fmt: skip


@cache
def planned(name: str) -> tuple[PartitionProblem, PartitionChoice, StageGraphSolution]:
    """The problem over four devices, its best chain, and its best graph of stages."""
    base = compiled(name)
    problem, _ = price(
        base.prepared, base.captured, Cluster.parse("local:4"), batch_size=8,
        microbatches=MICROBATCHES, min_stages=STAGES, max_stages=STAGES,
    )  # fmt: skip
    chain = solve(problem).choice
    assert chain is not None
    found = solve_branches(problem, chain, time_limit=200.0)  # of a busy machine
    assert found is not None
    return problem, chain, found


def program(name: str, order: tuple[int, ...], starts: tuple[int, ...]) -> Program:
    """The model with stages that take the blocks in that order."""
    base, (problem, _, found) = compiled(name), planned(name)
    choice = PartitionChoice(
        variant=found.choice.variant, schedule=found.choice.schedule, starts=starts
    )
    graph = assign(base.prepared, starts, order)
    spec, sources = generate(graph, base.captured, base.plan.seed)
    moved = regroup(problem, [(b,) for b in order]) if order else problem
    chain = evaluate_chain(moved, choice).seconds
    plan = make_plan(
        base.plan.model,
        Cluster.parse(f"local:{STAGES}"),
        spec,
        make(choice.schedule, range(STAGES), MICROBATCHES, find_stage_edges(spec)),
        moved,
        Solution(
            status="best found", choice=choice, objective=chain, bound=0.0, solver="branches",
            candidates=(choice,),
        ),
        batch_size=base.plan.batch_size,
        optimizer="adamw",
        provenance={},
        constraints={},
    )  # fmt: skip
    plan = msgspec.structs.replace(plan, order=order)
    whole = StagedGraph(base.captured, base.prepared, tuple(starts), tuple(order), 1)
    return replace(base, plan=plan, whole=whole, spec=spec, sources=sources)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_branches_run_side_by_side_and_are_faster(name: str) -> None:
    """By the objective and by simulation, against the best chain of as many stages."""
    problem, chain, found = planned(name)
    assert found.objective < evaluate_chain(problem, chain).seconds
    assert found.status == "optimal"
    made = program(name, found.order, found.starts)
    wanted = evaluate(problem, found.choice)
    schedule = made.schedule()
    assert count_in_flight(schedule) == tuple(s.in_flight for s in wanted.stages)
    assert max(s.in_flight for s in wanted.stages) < STAGES, "some stages run side by side"

    def seconds(one: Program) -> float:
        cost = evaluate(problem, found.choice) if one is made else evaluate_chain(problem, chain)
        arriving = [s.transfer_seconds for s in cost.stages]
        return simulate(
            one.schedule(), find_stage_edges(one.spec),
            [s.forward_seconds + t / 2 for s, t in zip(cost.stages, arriving, strict=True)],
            [s.backward_seconds + t / 2 for s, t in zip(cost.stages, arriving, strict=True)],
        ).step_seconds  # fmt: skip

    assert seconds(made) < seconds(program(name, (), chain.starts))
    assert seconds(made) <= found.objective * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_numbers_in_one_process(name: str) -> None:
    """Training as in one process, dropout included; evaluation too."""
    _, _, found = planned(name)
    made = program(name, found.order, found.starts)
    seen = made.verify(steps=3)
    assert seen.passed and seen.ranks == STAGES, seen
    model, batch = MODELS[name]()
    trainer = made.trainer(torch.optim.AdamW)
    loss = trainer.eval_step(batch)
    trainer.close()
    with torch.no_grad():
        assert loss.item() == pytest.approx(model.eval()(**batch)["loss"].item(), rel=1e-5)


def train_exported(folder: str, weights: str, batch: str) -> tuple[list[float], bytes]:
    """On every rank: two steps of an exported program; the losses, and on rank 0 the state."""
    given = safetensors.torch.load_file(batch)
    trainer = load_trainer(folder, torch.optim.AdamW, weights=weights, timeout=60.0)
    losses = [float(trainer.step(given)) for _ in range(2)]
    state = trainer.state_dict()
    trainer.close()
    return losses, b"" if trainer.rank else safetensors.torch.save(plain(state))


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that a file takes."""
    return {name: t.detach().clone().contiguous() for name, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_numbers_over_gloo(name: str, pool: Pool, tmp_path: Path) -> None:
    """Four real processes, one stage each: every bit is that of the run in one process above."""
    _, _, found = planned(name)
    made = program(name, found.order, found.starts)
    _, batch = MODELS[name]()
    files = [str(tmp_path / f"{what}.safetensors") for what in ("weights", "batch")]
    safetensors.torch.save_file(plain(made.captured.state), files[0])
    safetensors.torch.save_file(plain(batch), files[1])
    made.export(tmp_path / "build")
    answers = pool.run(train_exported, str(tmp_path / "build"), *files, ranks=4, timeout=240)
    trainer = made.trainer(torch.optim.AdamW)
    losses = [float(trainer.step(batch)) for _ in range(2)]
    wanted = plain(trainer.state_dict())
    trainer.close()
    assert [answer[0] for answer in answers] == [losses] * 4
    state = safetensors.torch.load(answers[0][1])
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[n], t) for n, t in wanted.items())


@pytest.mark.slow
def test_any_order_in_which_nothing_flows_back_gives_the_same_numbers() -> None:
    """The towers' blocks interleaved: stages are no branches, and the numbers stay."""
    problem, _, _ = planned("towers")
    n = len(problem.blocks)
    tower = [[b for b in range(n) if problem.blocks[b].startswith(w)] for w in ("text", "image")]
    left = [0, *tower[0]]
    right = [b for b in range(n) if b not in left and b not in tower[1][-1:] and b < n - 2]
    mixed = [b for pair in zip(left, right, strict=False) for b in pair]
    order = (*mixed, *(b for b in range(n) if b not in mixed))
    seen = program("towers", order, (0, 5, 10, 15)).verify(steps=2)
    assert seen.passed, seen


class Probe(nn.Module):
    """A loss, and beside it an output of layers that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.probe, self.scores = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(torch.tanh(self.trunk(x)))
        scores = self.scores(torch.tanh(self.probe(x)))
        return {"loss": nn.functional.mse_loss(found, y), "scores": scores}


@pytest.mark.slow
def test_outputs_without_a_loss_follow_what_they_read() -> None:
    """Evaluation computes them: no order of blocks puts a reader first, though training may."""
    example = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    one = fxpart.compile(Probe(), "local:1", example_kwargs=example)
    problem, _ = price(one.prepared, one.captured, Cluster.parse("local:2"), batch_size=8)
    graph, blocks = BlockGraph.of(problem), problem.blocks
    reader, made = blocks.index("scores"), blocks.index("probe")
    assert graph.ancestors[reader] >> made & 1
    assert all(value.trips == 0 for value in problem.values if value.producer == made)
