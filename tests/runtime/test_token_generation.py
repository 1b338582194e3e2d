"""Generation during training: the tokens of the plain model, on every layout of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.errors import FxpartError

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "none", "stages": 2},
    "tensor": {"mesh": "tp=2", "stages": 1},
    "zero 3": {"mesh": "dp=2", "stages": 1, "zero": 3},
}


class Causal(nn.Module):
    """A causal transformer layer with learned positions. kind: what it returns."""

    def __init__(self, kind: str = "logits") -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.places = nn.Embedding(17, 16), nn.Embedding(24, 16)
        self.qkv, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, 17)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.drop(torch.relu(self.mlp(x))))
        if self.kind == "pair":
            assert targets is not None
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return {"loss": loss, "scores": logits, "hidden": x}
        return logits.flatten(1).mean(1) if self.kind == "mean" else logits.mT


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(seed))


def make_trainer(kind: str = "pair", optimizer: Any = "sgd", **constraints: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Causal(kind)
    ranks = constraints["stages"] * (2 if "=2" in constraints["mesh"] else 1)
    given: dict[str, Any] = {"example_inputs": {"ids": tokens(4, 12), "targets": tokens(4, 12)}}
    if kind != "pair":
        given = {"example_inputs": (tokens(4, 12), tokens(4, 12)[:, 0]), "loss": mean_loss}
    program = fxpart.compile(
        model, f"local:{ranks}", microbatches=2, constraints=constraints, check="off", **given
    )
    return model, program.trainer(optimizer)


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().mean() + 0 * targets.float().mean()


def plain_tokens(model: nn.Module, prompt: torch.Tensor, count: int) -> list[int]:
    """The most likely tokens of one row, one after the other, in one process."""
    model.eval()
    for _ in range(count):
        scores = model(prompt[None], prompt[None])["scores"][0, -1]
        prompt = torch.cat([prompt, scores.argmax()[None]])
    return prompt.tolist()


def run(constraints: dict[str, Any]) -> list[Any]:
    """Tokens before and after two steps, greedy and drawn, with rows of different lengths."""
    model, trainer = make_trainer(**constraints)
    batch = {"ids": tokens(4, 12, 1), "targets": tokens(4, 12, 2)}
    found = []
    for step in range(2):
        prompts = [tokens(1, n, 7 + n)[0] for n in (3, 5, 4)]
        found += [
            row.tolist() for row in trainer.generate(prompts, max_new_tokens=6, logits="scores")
        ]
        model.load_state_dict(trainer.state_dict())
        assert found[-3:] == [plain_tokens(model, row, 6) for row in prompts], step
        model.train()
        drawn = trainer.generate(
            tokens(3, 4), max_new_tokens=6, temperature=0.9, top_p=0.9, seed=5, logits="scores"
        )
        found.append(drawn.tolist())
        trainer.step(batch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_generates_the_tokens_of_the_plain_model(layout: str, pool: Pool) -> None:
    """On two ranks too, where draws are also those of one process."""
    one, other = pool.run(run, LAYOUTS[layout])
    assert one == other == run({"mesh": "none", "stages": 1})


@pytest.mark.slow
def test_a_model_of_transformers_generates_as_by_itself() -> None:
    """Greedy and drawn tokens of ``generate`` of transformers, with an end-of-sequence token."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(3, 64, (4, 16))
    program = fxpart.compile(
        model, "local:2", microbatches=2, constraints={"stages": 2, "mesh": "none"}, check="off",
        example_inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
    )  # fmt: skip
    trainer, model, prompts = program.trainer("sgd"), model.eval(), ids[:3, :5]
    more: dict[str, Any] = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 12}
    plain = model.generate(prompts, do_sample=False, **more)
    found = trainer.generate(prompts, max_new_tokens=12, eos_token_id=2)
    assert found.tolist() == plain.tolist()
    assert (found[:, 5:] == 2).any(), "a row ends early"
    sampling = {"temperature": 0.8, "top_k": 10, "top_p": 0.9}
    torch.manual_seed(3)
    plain = model.generate(prompts, do_sample=True, **sampling, **more)
    found = trainer.generate(prompts, max_new_tokens=12, eos_token_id=2, seed=3, **sampling)
    assert found.tolist() == plain.tolist()


@pytest.mark.slow
def test_samples_in_a_run_leave_it_unchanged() -> None:
    """A callback generates after each update."""
    batch = {"ids": tokens(4, 12, 1), "targets": tokens(4, 12, 2)}
    results = []
    for samples in (False, True):
        _, trainer = make_trainer(mesh="none", stages=2)
        seen: list[Any] = []

        def sample(info: Any, trainer: Any = trainer, seen: list[Any] = seen) -> None:
            seen.append(trainer.generate(tokens(1, 3), max_new_tokens=3, logits="scores").tolist())

        trainer.fit([batch] * 3, callbacks=[sample] if samples else [])
        assert len(seen) == (3 if samples else 0)
        results.append(trainer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(r.values() for r in results), strict=True))


@pytest.mark.slow
def test_sizes_may_be_read_from_labels() -> None:
    """In bfloat16 those of the batch are; the tokens are those of autocast."""
    model, trainer = make_trainer(mesh="none", stages=2, precision="bf16")
    (found,) = trainer.generate([tokens(1, 3)[0]], max_new_tokens=5, logits="scores")
    with torch.autocast("cpu", torch.bfloat16):
        assert found.tolist() == plain_tokens(model, tokens(1, 3)[0], 5)


@pytest.mark.slow
def test_an_asynchronous_pipeline_is_flushed_first() -> None:
    model, trainer = make_trainer(mesh="none", stages=2, mode="async")
    for seed in range(3):
        trainer.submit({"ids": tokens(4, 12, seed), "targets": tokens(4, 12, seed + 1)})
    assert trainer.in_flight
    (found,) = trainer.generate([tokens(1, 3)[0]], max_new_tokens=5, logits="scores")
    assert not trainer.in_flight
    model.load_state_dict(trainer.state_dict())
    assert found.tolist() == plain_tokens(model, tokens(1, 3)[0], 5)


@pytest.mark.slow
def test_invalid_arguments() -> None:
    _, trainer = make_trainer(mesh="none", stages=1)
    prompts = tokens(2, 3)
    for given, text in (
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer of at least 1"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_p": "a"}, "top_p must be a number"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"top_k": 3}, "need a temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be more than 0"),
        ({"tokens": 3}, "unexpected keyword"),
        ({"logits": "loss"}, "loss is not one of them"),
        ({}, "it is not known which of them has logits"),
    ):
        with pytest.raises(FxpartError, match=text) as caught:
            trainer.generate(prompts, **given)
        assert caught.value.code == "FXP109"
    for wrong in (prompts.float(), prompts[0], [], [prompts], prompts[:, :0]):
        with pytest.raises(FxpartError, match="FXP105"):
            trainer.generate(wrong, logits="scores")
    _, other = make_trainer("mean", mesh="none", stages=1)
    with pytest.raises(FxpartError, match="of shape .rows, length, vocabulary."):
        other.generate(prompts)
