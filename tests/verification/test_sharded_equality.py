"""Data, tensor, pipeline parallelism and ZeRO give the numbers of one process.

Every model of :mod:`sharded_models` in every way, all ranks in this process, and exported to real
processes over gloo. What is compared are loss, gradients and parameters of three AdamW steps with
one process that runs the whole captured graph: :func:`fxpart.verify.compare`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Pool
from sharded_models import TENSOR, WAYS
from sharded_ranks import as_seen, train, written
from sharded_runs import CHAOTIC, KEY_BIASES, STEPS, base, told, wrong, wrong_at_first
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.compat.optimizer_choice import choose
from fxpart.verification.comparison import compare, verify
from fxpart.verification.verification_result import TOLERANCE

pytestmark = pytest.mark.slow


# The others take parts of the same ways: of the larger models they are left to `make long`.
FIRST = ("tensor 2", "data 2 x tensor 2", "pipeline 2 x tensor 2", "zero 3 x 2")
PARTS = {"first": FIRST, "others": tuple(way for way in WAYS if way not in FIRST)}


@pytest.fixture(scope="module", params=[f"{model}-{part}" for model in TENSOR for part in PARTS])
def cut(request: pytest.FixtureRequest) -> tuple[str, dict[str, Program]]:
    """A model and its program in several ways, made once for both tests that run it."""
    model, _, part = request.param.rpartition("-")
    return model, {way: base(model).sharded(model, way) for way in PARTS[part]}


def test_in_this_process(cut: tuple[str, dict[str, Program]]) -> None:
    """All ways, the largest difference at most 1e-6 or what the last bit of the weights makes."""
    model, programs = cut
    faults = {}
    for way, program in programs.items():
        found = verify(program, steps=STEPS, batch=base(model).batch)
        assert found.ranks == program.plan.world >= 2
        why = wrong(model, found)
        if not why and way == "data 2 x tensor 2":  # the one in which most is added up
            why = wrong_at_first(model, verify(program, steps=1, batch=base(model).batch))
        if why:
            faults[way] = why
    assert not faults, "\n".join(f"{way}: {why}" for way, why in faults.items())


def test_over_gloo(cut: tuple[str, dict[str, Program]], pool: Pool, tmp_path: Path) -> None:
    """The exported programs on two and four real processes, without the model and the compiler."""
    model, programs = cut
    given = base(model)
    files = written(given, tmp_path)
    faults = {}
    for way, program in programs.items():
        ranks = program.plan.world
        folder = tmp_path / way.replace(" ", "_")
        program.export(folder)
        first, *others = pool.run(train, str(folder), *files, ranks=ranks, timeout=120)
        assert others == [b""] * (ranks - 1)
        seen = as_seen(first)
        found = compare(program, choose(torch.optim.AdamW).make, given.batch, seen)
        if why := wrong(model, found):
            faults[way] = why
    assert not faults, "\n".join(f"{way}: {why}" for way, why in faults.items())


@pytest.mark.parametrize("way", ["data 2 x tensor 2"])
@pytest.mark.parametrize("model", sorted(TENSOR.keys() - CHAOTIC - {"mixtral"}))
def test_in_float64(model: str, way: str) -> None:
    """Where rounding hides nothing, every difference is far below 1e-6.

    Not for mixtral: torch has no grouped product of float64.
    """
    given = base(model, torch.float64)
    found = verify(given.sharded(model, way), steps=STEPS, batch=given.batch)
    assert found.passed and found.largest <= TOLERANCE, told(found)
    assert sum(d.noise for d in found.differences) <= KEY_BIASES.get(model, 0), told(found)


@pytest.mark.parametrize("way", ["data 2 x tensor 2", "pipeline 2 x tensor 2", "zero 3 x 2"])
def test_evaluation_and_checkpoints(way: str) -> None:
    """eval_step gives the loss of the whole model in evaluation mode, after training too."""
    given = base("gpt2")
    sharded = given.sharded("gpt2", way).trainer(torch.optim.AdamW)
    whole = given.program.trainer(torch.optim.AdamW)
    for trainer in (sharded, whole):
        trainer.step(given.batch)
    losses = [float(trainer.eval_step(given.batch)) for trainer in (sharded, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    whole.load_state_dict(sharded.state_dict())
    assert float(whole.eval_step(given.batch)) == pytest.approx(losses[0], rel=1e-6)


def test_a_plan_applied_again_gives_the_same_program() -> None:
    """Also where the solver chose, and for every mesh rank."""
    given = base("recommender")
    first = given.program.replan(
        "local:4", microbatches=2, constraints={"mesh": "dp=2,tp=2", "stages": 1, "zero": 3}
    )
    assert first.plan.sharding is not None and first.plan.sharding.certificate is not None
    plan = fxpart.Plan.loads(first.plan.dumps())
    built = ZOO["recommender"].build()
    again = fxpart.compile(built.model, plan=plan, example_inputs=built.batch, loss=built.loss)
    assert [again.mesh_rank_program(k) for k in range(4)] == [
        first.mesh_rank_program(k) for k in range(4)
    ]
    assert verify(again).passed


class EncodedThenRecurrent(torch.nn.Module):
    """torch finds out the length of sequences only at the recurrent layer, and keeps its symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20)
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.recurrent = torch.nn.GRU(16, 16, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.recurrent(self.encoder(self.table(ids)))[0])
        return out


def test_a_symbol_that_became_a_number() -> None:
    torch.manual_seed(0)
    ids = torch.randint(20, (6, 8))
    program = fxpart.compile(
        EncodedThenRecurrent(), "local:2", example_inputs=(ids, ids),
        loss=lambda out, y: torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        constraints={"mesh": "dp=2", "stages": 1},
    )  # fmt: skip
    assert verify(program, steps=2).passed
