"""Adapters of peft: trained, saved and resumed as by the plain Trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "peft")):
    pytest.skip("transformers, accelerate and peft are not installed", allow_module_level=True)

import integration_programs as programs
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from fxpart.integrations.transformers import PlannedTrainer

pytestmark = pytest.mark.slow
TWO_STAGES = {"cluster": "local:2", "constraints": {"stages": 2}, "check": "off"}


def adapted() -> Any:
    """The small Llama with an adapter on its attention."""
    model = programs.make_model()
    torch.manual_seed(1)
    layers = ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=layers, task_type="CAUSAL_LM"))


def train(kind: Any, options: dict[str, Any], folder: Path, resume: str | None = None) -> Any:
    trainer = programs.make_trainer(
        kind, {**options, "model": adapted()}, output_dir=str(folder), save_strategy="steps",
        learning_rate=0.05,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_adapters_train_as_with_the_plain_trainer(tmp_path: Path) -> None:
    mine = train(PlannedTrainer, TWO_STAGES, tmp_path / "planned")
    theirs = train(transformers.Trainer, {}, tmp_path / "plain")
    assert programs.distance(programs.history(mine), programs.history(theirs)) < 1e-5
    moved = 0
    for (name, one), other in zip(
        mine.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        assert one.detach() == pytest.approx(other.detach(), abs=1e-5), name
        moved += bool(one.detach().abs().sum()) and "lora_B" in name  # It starts at zero.
    assert moved == 4
    # peft reads the folder, which has only the adapter.
    saved = tmp_path / "planned" / "checkpoint-3"
    assert not (saved / "model.safetensors").exists()
    last = PeftModel.from_pretrained(
        programs.make_model(), str(tmp_path / "planned" / "checkpoint-6")
    )
    for one, other in zip(last.parameters(), mine.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again = train(PlannedTrainer, TWO_STAGES, tmp_path / "again", resume=str(saved))
    for one, other in zip(again.model.parameters(), mine.model.parameters(), strict=True):
        assert torch.equal(one, other)
