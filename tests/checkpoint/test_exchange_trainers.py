"""A trainer's checkpoint through every format into another plan's trainer, and into plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trainers import everything, mesh_ranks, pipeline, steps
from hand_stages import batch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from fxpart.checkpoint.exchange.conversion import FORMATS, ConversionOptions, convert
from fxpart.checkpoint.exchange.huggingface import KeyPrefixes
from fxpart.checkpoint.exchange.paddle_files import read_strategies
from fxpart.errors import FxpartError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four stages after two steps."""
    trainer = pipeline("four")
    steps(trainer, range(2))
    return trainer.save_checkpoint(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "hf"])
def test_through_a_format_into_another_plan(tmp_path: Path, saved: Path, form: Any) -> None:
    """Everything is as it was, and goes on as if nothing had been."""
    convert(saved, tmp_path / "there", form)
    back = convert(tmp_path / "there", tmp_path / "back", "fxpart", form=form)
    there, here = pipeline("two"), pipeline("two")
    there.load_checkpoint(back.path)
    here.load_checkpoint(saved)
    assert everything(there) == everything(here)
    assert steps(there, range(2, 4)) == steps(here, range(2, 4))
    assert everything(there) == everything(here)


def test_the_model_alone(tmp_path: Path, saved: Path) -> None:
    convert(saved, tmp_path / "hf", "hf")
    back = convert(tmp_path / "hf", tmp_path / "back", "fxpart")
    there, here = pipeline("two"), pipeline("two")
    there.load_checkpoint(back.path)
    here.load_checkpoint(saved)
    found, wanted = there.state_dict(), here.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (tmp_path / "run").mkdir()
    (tmp_path / "back").rename(tmp_path / "run" / "checkpoints")
    with pytest.raises(FxpartError, match="not saved by fit"):
        there.fit([batch()], steps=1, checkpoints=tmp_path / "run")


@pytest.mark.parametrize("way", ["tp", "tp and zero-1", "dp"])
def test_parts_of_lanes_in_paddles_dictionaries(tmp_path: Path, way: str) -> None:
    """What lay in an even grid over ranks is told so; the rest, whole on one."""
    trainer = mesh_ranks(way)
    path = trainer.save_checkpoint(tmp_path / "saved")
    convert(path, tmp_path / "there", "paddle")
    cut = [
        name
        for file in (tmp_path / "there").glob("*.pdattr.json")
        for name, strategy in read_strategies(file).items()
        if max(strategy.process_shape) > 1
    ]
    assert bool(cut) == way.startswith("tp")
    back = convert(tmp_path / "there", tmp_path / "back", "fxpart")
    other = mesh_ranks("pipeline")
    other.load_checkpoint(back.path)
    assert everything(other) == everything(trainer)


def test_plain_torch_goes_on(tmp_path: Path, saved: Path) -> None:
    """torch's own reader fills a module and its optimizer, whose next steps are the trainer's."""
    bare = ConversionOptions(prefixes=KeyPrefixes("model.", "optimizer.state."))
    convert(saved, tmp_path / "dcp", "dcp", options=bare)
    trainer = pipeline("four")
    trainer.load_checkpoint(saved)
    wanted: dict[str, Any] = {
        "model": dict(trainer.state_dict()),
        "optimizer": {"state": trainer.optimizer_state_dict()["state"]},
    }
    for alias in trainer.spec.aliases:
        del wanted["model"][alias]
    found = _like(wanted)
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "dcp")), no_dist=True)
    assert _bits(found) == _bits(wanted)


def _like(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _like(value) for key, value in given.items()}
    return torch.full_like(given, 7)


def _bits(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _bits(value) for key, value in given.items()}
    return given.dtype, given.contiguous().numpy().tobytes()
