"""Context parallelism: sequences over an axis, keys and values gathered, equal to one process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from context_programs import planned, train_measured
from ranks import Pool
from sharded_models import TENSOR
from sharded_ranks import as_seen, train, written
from sharded_runs import base, wrong
from torch import nn
from zoo import ZOO
from zoo_language import make_model

import fxpart
from fxpart import FxpartError, Plan, Program
from fxpart.collectives import CommunicationCounts, context_attention
from fxpart.compat import attention_kernels
from fxpart.compat.optimizer_choice import choose
from fxpart.planner import context_parallelism
from fxpart.report.sharding import headline
from fxpart.verification.comparison import compare, verify

pytestmark = pytest.mark.slow
LAYERS, ROWS, TOKENS, GROUPS, WIDTH = 4, 4, 12, 2, 8  # of the zoo's Llama

WAYS: dict[str, dict[str, int | str]] = {
    "context 2": {"mesh": "cp=2", "stages": 1},
    "context 4": {"mesh": "cp=4", "stages": 1},
    "data 2 x context 2": {"mesh": "dp=2,cp=2", "stages": 1, "zero": 1},
    "context 2 x data 2": {"mesh": "cp=2,dp=2", "stages": 1},
    "tensor 2 x context 2": {"mesh": "tp=2,cp=2", "stages": 1},
    "pipeline 2 x context 2": {"mesh": "cp=2", "stages": 2},
    "data 2 x context 2, zero 2": {"mesh": "dp=2,cp=2", "stages": 1, "zero": 2},
    "data 2 x context 2, zero 3": {"mesh": "dp=2,cp=2", "stages": 1, "zero": 3},
    "zero 3 x context 4": {"mesh": "cp=4", "stages": 1, "zero": 3},
    "zero 1 over both": {"mesh": "dp=2,cp=2", "stages": 1, "zero": 1, "zero_axis": "dp,cp"},
    "zero 2 over both": {"mesh": "cp=2,dp=2", "stages": 1, "zero": 2, "zero_axis": "dp,cp"},
}


def sharded(model: str, way: str, **constraints: int | str) -> Program:
    """A model of the zoo in one of the ways."""
    given = dict(WAYS[way]) | constraints
    if "tp" in str(given["mesh"]):
        given["annotations"] = json.dumps({"annotations": TENSOR[model]})
    one = base(model)
    return one.program.replan("local:4", microbatches=one.microbatches, constraints=given)


def degrees(plan: Plan) -> set[tuple[int, int, int]]:
    """Data, tensor and context degree of the stages."""
    return {(s.data_parallel, s.tensor_parallel, s.context_parallel) for s in plan.stages}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "mixtral"])
def test_in_this_process(model: str, way: str) -> None:
    """Loss, gradients and parameters of three steps are those of one process."""
    program = sharded(model, way)
    found = verify(program, steps=3, batch=base(model).batch)
    assert found.ranks == program.plan.world >= 2
    why = wrong(model, found)
    assert not why, why


@pytest.mark.parametrize("mesh", ["cp=2", "cp=3", "dp=2,cp=2"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_stripes(model: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have pieces of several parts of the sequences, so that they read as many keys."""
    monkeypatch.setattr(context_parallelism, "_SHORTEST", 1)
    program = sharded(model, "context 2", mesh=mesh)
    assert "cp:S(1," in program.plan.dumps()
    assert ("stripes=" in program.sources[0]) == (model == "llama")  # GPT-2 has dropout
    found = verify(program, steps=3, batch=base(model).batch)
    why = wrong(model, found)
    assert not why, why


@pytest.mark.parametrize(
    "way", ["data 2 x context 2", "pipeline 2 x context 2", "zero 2 over both"]
)
def test_over_gloo(way: str, pool: Pool, tmp_path: Path) -> None:
    """The exported program on four processes."""
    program, given = sharded("llama", way), base("llama")
    program.export(tmp_path / "program")
    files = written(given, tmp_path)
    first, *others = pool.run(train, str(tmp_path / "program"), *files, ranks=4, timeout=120)
    assert others == [b""] * 3
    found = compare(program, choose(torch.optim.AdamW).make, given.batch, as_seen(first))
    why = wrong("llama", found)
    assert not why, why


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_over_both_axes(zero: int, tmp_path: Path) -> None:
    """A rank stores a quarter of the optimizer's state, and one reduce-scatter sums gradients.

    Checkpoints load into a layout with ZeRO over the data-parallel axis only, and back.
    """
    ways = ["data 2 x context 2", "zero 1 over both"]
    one, both = (sharded("llama", way, zero=zero) for way in ways)
    memory = [program.plan.prediction.ranks[0].memory for program in (one, both)]
    assert memory[1].optimizer == pytest.approx(memory[0].optimizer / 2, rel=1e-3)
    assert both.plan.problems() == () and "ZeRO" in headline(both.plan)
    trainer, batch = both.trainer(torch.optim.AdamW), base("llama").batch
    trainer.step(batch)
    assert trainer.parts.meshes is not None
    counts = trainer.parts.meshes.of(0, 0).counts
    counts.clear()
    trainer.step(batch)
    parameters, repeats = 4 * both.plan.model.parameters, 1 if zero == 1 else both.plan.microbatches
    assert counts.bytes["all_gather", "dp,cp"] == parameters
    assert counts.bytes["reduce_scatter", "dp,cp"] == repeats * parameters
    reduced = sum(int(n) for (kind, _), n in counts.bytes.items() if kind == "all_reduce")
    assert reduced < 0.01 * parameters
    other = one.trainer(torch.optim.AdamW)
    for new, old in ((other, trainer), (trainer, other)):
        saved = old.save_checkpoint(tmp_path / type(old).__name__ / str(old.updates))
        state = {name: tensor.clone() for name, tensor in old.state_dict().items()}
        moments = old.optimizer_state_dict()["state"]
        new.load_checkpoint(saved)
        assert all(torch.equal(tensor, state[name]) for name, tensor in new.state_dict().items())
        for name, known in new.optimizer_state_dict()["state"].items():
            assert torch.equal(known["exp_avg_sq"], moments[name]["exp_avg_sq"]), name
        new.step(batch)
    trainer.close()
    other.close()


def test_collectives_are_those_of_gathered_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per layer two all-gathers forward and two reduce-scatters backward, of keys and of values.

    The bytes are those of Llama 3's context parallelism (Grattafiori et al., 2024, section 3.3.2):
    batch x tokens x heads of keys x width. Besides, labels are gathered once, to be shifted.
    """
    program = sharded("llama", "context 4")
    trainer, batch = program.trainer(), base("llama").batch
    trainer.step(batch)
    sent: Counter[tuple[str, int]] = Counter()

    def note(self: Any, kind: str, axis: Any, size: int) -> None:
        sent[kind, int(size)] += 1

    monkeypatch.setattr(CommunicationCounts, "note", note)
    trainer.step(batch)
    trainer.close()
    rows, times = ROWS // 2, 4 * 2  # of a microbatch; ranks and microbatches
    one, labels = rows * TOKENS * GROUPS * WIDTH * 4, rows * TOKENS * 8
    reduced = sum(n * size for (kind, size), n in sent.items() if kind == "all_reduce")
    moved = Counter({key: n for key, n in sent.items() if key[0] != "all_reduce"})
    assert moved == {
        ("all_gather", one): times * 2 * LAYERS,
        ("reduce_scatter", one): times * 2 * LAYERS,
        ("all_gather", labels): times,
    }
    gradients = 4 * 4 * program.plan.model.parameters
    assert gradients < reduced < 1.002 * gradients  # and losses and counts of targets


def test_reported() -> None:
    program = sharded("llama", "data 2 x context 2")
    plan = Plan.loads(program.plan.dumps())
    assert degrees(plan) == {(2, 1, 2)}
    assert "dp2 cp2 zero1" in str(plan)
    assert "2 context-parallel" in headline(plan)
    assert plan.equivalence is not None
    assert "gradients are summed over 2 parts of each sequence" in plan.equivalence.reasons
    assert degrees(sharded("llama", "tensor 2 x context 2").plan) == {(1, 2, 2)}
    assert '"context_parallel"' not in sharded("llama", "context 2", mesh="tp=2").plan.dumps()


def test_a_plan_applied_again_gives_the_same_program() -> None:
    """With placements whose parts are symbols."""
    first = sharded("gpt2", "context 2")
    text = first.plan.dumps()
    assert "cp:S(0,s" in text
    again = fxpart.compile(
        ZOO["gpt2"].build().model, plan=Plan.loads(text), example_inputs=base("gpt2").batch
    )
    assert [again.mesh_rank_program(k) for k in range(2)] == [
        first.mesh_rank_program(k) for k in range(2)
    ]


class Decoder(nn.Module):
    """One layer whose sequences have a fixed length."""

    def __init__(
        self, tokens: int = 16, heads: int = 2, dropout: float = 0.0, flat: bool = False
    ) -> None:
        super().__init__()
        self.flat = flat
        self.places = nn.Parameter(torch.randn(tokens, 16))
        self.words = nn.Embedding(31, 16)
        self.inner = nn.Linear(16, 48)
        self.out = nn.Linear(16, 31)
        self.heads, self.dropout = heads, dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places
        parts = self.inner(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(
            *parts.unbind(), is_causal=True, dropout_p=self.dropout
        )
        x = x + found.transpose(1, 2).contiguous().view(x.shape)
        if self.flat:
            x = nn.functional.dropout(x.flatten(0, 1), 0.1).view(x.shape)
        return self.out(x)


def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over counted targets."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=3)


def decoder(
    tokens: int = 16, mesh: str = "cp=2", dropout: float = 0.0, flat: bool = False
) -> Program:
    """The layer on a mesh, with targets that are not counted on one rank more than on others."""
    torch.manual_seed(0)
    ids = torch.randint(4, 31, (4, tokens))
    target = ids.roll(-1, 1)
    target[:, : tokens // 2 - 1] = 3
    return fxpart.compile(
        Decoder(tokens, dropout=dropout, flat=flat), "local:4", example_inputs=(ids, target),
        loss=loss, microbatches=2, constraints={"mesh": mesh, "stages": 1}, optimizer="adamw",
    )  # fmt: skip


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2,cp=2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fixed_length_and_uncounted_targets(mesh: str, dropout: float) -> None:
    program = decoder(mesh=mesh, dropout=dropout)
    assert {context for _, _, context in degrees(program.plan)} == {int(mesh[-1])}
    assert ("attention_rows" in program.sources[0]) == (dropout == 0)
    found = verify(program, steps=3)
    assert found.passed and found.largest <= 1e-6


def test_generation_through_lengths_that_do_not_divide() -> None:
    ids = base("llama").program
    one, two = ids.trainer(), sharded("llama", "context 2").trainer()
    prompts = torch.randint(4, 20, (2, 5))
    wanted = one.generate(prompts, max_new_tokens=4)
    assert torch.equal(two.generate(prompts, max_new_tokens=4), wanted)
    one.close()
    two.close()


def test_random_numbers_for_rows_of_several_sequences() -> None:
    with pytest.raises(FxpartError, match="FXP108"):
        decoder(flat=True)


def test_without_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_find_kernel", lambda *_: "")
    found = verify(decoder(), steps=3)
    assert found.passed and found.largest <= 1e-6


def test_an_output_with_another_layout_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model views what fused kernels return, without a copy."""

    def contiguous(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    monkeypatch.setattr(context_attention, "_make_output", contiguous)
    program = decoder()
    assert "aten_reshape" in program.sources[0]
    assert verify(program, steps=1).passed


@pytest.mark.parametrize("mesh", ["cp=5", "cp=8"])
def test_sequences_that_do_not_divide(mesh: str) -> None:
    with pytest.raises(FxpartError, match="does not divide sequences of 12 tokens"):
        base("llama").program.replan("local:8", constraints={"mesh": mesh, "stages": 1})


def test_sequences_as_long_as_the_position_ids() -> None:
    """The slice of the ids is then all of them at capture, but no constant."""
    torch.manual_seed(0)
    model = make_model(
        "BertForMaskedLM", "BertConfig", vocab_size=31, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(4, 31, (4, 16))
    program = fxpart.compile(
        model, "local:2", example_inputs={"input_ids": ids, "labels": ids},
        constraints={"mesh": "cp=2", "stages": 1},
    )  # fmt: skip
    assert verify(program, steps=2).passed
    trainer = program.trainer("sgd")
    trainer.step({"input_ids": ids[:, :8], "labels": ids[:, :8]})
    trainer.close()


def test_a_model_without_attention() -> None:
    with pytest.raises(FxpartError, match="no attention whose queries"):
        fxpart.compile(
            nn.Linear(8, 8), "local:2", example_inputs=(torch.randn(4, 8), torch.randn(4, 8)),
            loss=nn.functional.mse_loss, constraints={"mesh": "cp=2", "stages": 1},
        )  # fmt: skip


def test_a_batch_with_other_lengths() -> None:
    trainer = sharded("llama", "context 2").trainer()
    longer = {name: tensor.repeat(1, 2) for name, tensor in base("llama").batch.items()}
    trainer.step(longer)
    shorter = {name: tensor[:, :9] for name, tensor in base("llama").batch.items()}
    with pytest.raises(FxpartError, match="FXP105"):
        trainer.step(shorter)
    trainer.close()


def estimates(mesh: str, **constraints: int | str) -> Program:
    """The program on a mesh where one host has eight devices."""
    given = {"mesh": mesh, "stages": 1, **constraints}
    return base("llama").program.replan("local:8", microbatches=2, constraints=given)


@pytest.mark.parametrize("ranks", [2, 4])
def test_estimates_agree_with_exact_prices(ranks: int) -> None:
    """Where the degree is fixed, the joint problem has it, priced like the lowered program."""
    program = base("llama").program.replan(
        "local:8", microbatches=2, constraints={"cp": ranks, "dp": 1, "stages": 1}
    )
    plan = program.plan
    assert degrees(plan) == {(1, 1, ranks)} and plan.degrees is not None
    assert f"sequences over {ranks} ranks" in plan.degrees.over
    assert plan.degrees.objective == pytest.approx(plan.prediction.step_seconds, rel=0.12)


def test_constraints_on_the_degree() -> None:
    assert degrees(estimates("cp=2", cp=2).plan) == {(1, 1, 2)}
    with pytest.raises(FxpartError, match="FXP109"):
        estimates("cp=2", cp=4)
    free = base("llama").program.replan("local:4", constraints={"forbid": "cp"}).plan
    assert all(context == 1 for _, _, context in degrees(free))


def test_long_sequences_where_one_device_is_too_small(pool: Pool, tmp_path: Path) -> None:
    """The planner selects context parallelism by itself; peaks are as predicted."""
    memory = 124 << 20
    with pytest.raises(FxpartError, match="FXP204"):
        planned(1, memory)
    program = planned(4, memory)
    assert degrees(program.plan) == {(1, 1, 4)} and len(program.plan.stages) == 1
    weights = tmp_path / "weights.safetensors"
    state = {name: tensor.detach().clone() for name, tensor in program.captured.state.items()}
    safetensors.torch.save_file(state, weights)
    program.export(tmp_path / "program")
    found = pool.run(
        train_measured, str(tmp_path / "program"), str(weights), ranks=4, timeout=400.0
    )
    assert {round(value, 4) for value, _ in found} == {round(found[0][0], 4)}
    (entry,) = program.plan.prediction.ranks
    expected = entry.memory.total - entry.memory.weights - entry.memory.buffers
    peaks = [peak for _, peak in found]
    assert all(peak <= entry.memory_limit for peak in peaks)
    assert 0.97 <= expected / max(peaks) <= 1.10
    assert "stripes=8" in program.sources[0]
