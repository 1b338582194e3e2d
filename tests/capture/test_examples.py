"""Example inputs inferred from what the model says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpart.capture import capture
from fxpart.capture.example_inputs import infer_examples


class Lightning(nn.Module):
    """What Lightning's modules carry."""

    def __init__(self, example: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.example_input_array = example

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.lin(x if y is None else x + y)


@pytest.mark.parametrize(
    ("example", "names"),
    [
        (torch.randn(3, 4), ["x"]),
        ((torch.randn(3, 4), torch.randn(3, 4)), ["x", "y"]),
        ({"y": torch.randn(3, 4), "x": torch.randn(3, 4)}, ["y", "x"]),
    ],
)
def test_lightning(example: Any, names: list[str]) -> None:
    captured = capture(Lightning(example), batch_size=6)
    assert [spec.name for spec in captured.inputs] == names
    assert captured.batch_size == 6 and captured.loss_kind == "mean-square"


class Timm(nn.Module):
    """What timm's models carry."""

    def __init__(self, name: str, settings: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        setattr(self, name, settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3))


class Settings:
    input_size = (3, 10, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pretrained_cfg", {"input_size": (3, 10, 12)}),
        ("default_cfg", {"input_size": [3, 10, 12]}),
        ("default_cfg", Settings()),
    ],
)
def test_timm(name: str, settings: Any) -> None:
    (image,) = infer_examples(Timm(name, settings), 5)
    assert image.shape == (5, 3, 10, 12)
    captured = capture(Timm(name, settings))
    assert captured.symbolic and captured.batch_size == 8


def test_the_global_generator_is_left_alone() -> None:
    model = Timm("default_cfg", Settings())
    before = torch.random.get_rng_state()
    first, again = infer_examples(model, 2), infer_examples(model, 2)
    capture(model)
    assert torch.equal(first[0], again[0])
    assert torch.equal(before, torch.random.get_rng_state())


SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
VIT = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5}
DECODER = {"decoder_start_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "options", "inputs", "labels", "kind"),
    [
        ("GPT2LMHeadModel", "GPT2Config", GPT2, ["input_ids"], (3, 24), "output"),
        ("GPT2Model", "GPT2Config", GPT2, ["input_ids"], None, "mean-square"),
        ("BertForMaskedLM", "BertConfig", SMALL, ["input_ids"], (3, 24), "output"),
        ("BertForSequenceClassification", "BertConfig", SMALL, ["input_ids"], (3,), "output"),
        ("BertForTokenClassification", "BertConfig", SMALL, ["input_ids"], (3, 24), "output"),
        ("BertForQuestionAnswering", "BertConfig", SMALL, ["input_ids"], None, "output"),
        ("BertForPreTraining", "BertConfig", SMALL, ["input_ids"], (3, 24), "output"),
        ("T5ForConditionalGeneration", "T5Config", {**T5, **DECODER}, ["input_ids"], (3, 128),
         "output"),
        ("T5Model", "T5Config", {**T5, **DECODER}, ["decoder_input_ids", "input_ids"], None,
         "mean-square"),
        ("ViTForImageClassification", "ViTConfig", VIT, ["pixel_values"], (3,), "output"),
        ("ViTModel", "ViTConfig", VIT, ["pixel_values"], None, "mean-square"),
    ],
)  # fmt: skip
def test_transformers(
    name: str, config: str, options: dict[str, Any], inputs: list[str],
    labels: tuple[int, ...] | None, kind: str,
) -> None:  # fmt: skip
    transformers = pytest.importorskip("transformers")
    settings = getattr(transformers, config)(**options)
    model = getattr(transformers, name)(settings).train()
    before = settings.to_dict()
    captured = capture(model, batch_size=3)
    assert settings.to_dict() == before
    assert captured.loss_kind == kind
    names = [spec.name for spec in captured.inputs]
    assert set(inputs) <= set(names)
    assert captured.example is not None and captured.eager is not None
    batch = captured.example()
    if labels is not None:
        assert batch["labels"].shape == labels
    loss = captured.eager(batch)[0]
    assert torch.isfinite(loss)
    assert all(spec.batch_dim == 0 for spec in captured.inputs)


@pytest.mark.slow
def test_two_towers_get_both_inputs() -> None:
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=VIT, projection_dim=8)
    captured = capture(transformers.CLIPModel(config), batch_size=3)
    assert {"input_ids", "pixel_values"} <= {spec.name for spec in captured.inputs}
    assert captured.loss_kind == "output"
    assert captured.constants[0].path == ("return_loss",)
