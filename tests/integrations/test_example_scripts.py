"""The examples for scripts that come from elsewhere."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MOST_LINES = 15


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nanogpt_changes_few_lines() -> None:
    plain, planned = (
        (EXAMPLES / f"{name}.py").read_text().splitlines()
        for name in ("nanogpt", "nanogpt_planned")
    )
    changed = [
        line
        for line in difflib.unified_diff(plain, planned, n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert 0 < len(changed) <= MOST_LINES


@pytest.mark.slow
def test_nanogpt_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and evaluations; the planned script resumes from the file of the plain one."""
    found: dict[str, Any] = {}
    scripts = {name: load(name) for name in ("nanogpt", "nanogpt_planned")}
    for name, script in scripts.items():
        for key, value in {
            "LAYERS": 2,
            "BATCH": 4,
            "EVERY": 4,
            "WARMUP": 3,
            "EVALUATED": 1,
        }.items():
            monkeypatch.setattr(script, key, value)
        found[name] = script.main(8, tmp_path / name)
    plain, planned = found.values()
    assert [line[0] for line in plain] == [4, 8]
    for mine, theirs in zip(planned, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    scripts["nanogpt"].main(8, tmp_path / "half", stop=4)
    (resumed,) = scripts["nanogpt_planned"].main(8, tmp_path / "half")
    assert resumed == pytest.approx(plain[1], rel=1e-5)
    saved, known = (
        torch.load(folder / "state.pt") for folder in (tmp_path / "half", tmp_path / "nanogpt")
    )
    assert saved["optimizer"]["state"].keys() == known["optimizer"]["state"].keys()
    for key, tensor in known["model"].items():
        assert torch.allclose(saved["model"][key], tensor, atol=1e-5), key


@pytest.mark.slow
def test_the_unet_trains_as_one_process() -> None:
    """Skip connections cross the stages; losses are those of an ordinary loop."""
    example = load("unet")
    losses, found = example.main(3)
    torch.manual_seed(0)
    model = example.UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        images, masks = example.make_batch(step)
        expected = torch.nn.functional.binary_cross_entropy_with_logits(model(images), masks)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert set(found) == {"loss", "overlap"}


@pytest.mark.slow
def test_the_adapter_is_saved_for_peft(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("accelerate", "peft")):
        pytest.skip("the example needs accelerate and peft")
    example = load("lora_llama")
    found, adapter = example.main(6, str(tmp_path))
    data = example.Counting(64, seed=1)
    rows = torch.stack([data[index]["input_ids"] for index in range(64)])
    with torch.no_grad():
        loss = adapter(input_ids=rows, labels=rows).loss
    assert loss.item() == pytest.approx(found["eval_loss"], rel=1e-4)
