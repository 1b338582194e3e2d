"""Hugging Face checkpoints in and out: read in parts, written a tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_programs import LAYERS, WIDTH, gpt2, ids, load, train_and_save, wrong
from ranks import Pool
from safetensors.torch import load_file, save_file

from fxpart.checkpoint.safetensors_index import INDEX
from fxpart.codegen.materialization import stored_names
from fxpart.codegen.tensor_files import TensorFiles
from fxpart.errors import FxpartError
from fxpart.program.spec import ProgramSpec, StageSpec, StateSpec


def sharded(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> Path:
    """A checkpoint as Hugging Face writes it, in so many files."""
    folder.mkdir(exist_ok=True)
    where = {}
    for index in range(files):
        name = f"model-{index + 1:05}-of-{files:05}.safetensors"
        mine = dict(list(tensors.items())[index::files])
        save_file(mine, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(mine, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def program(names: list[str], aliases: dict[str, str] | None = None) -> ProgramSpec:
    state = tuple(
        StateSpec(attribute=f"p{i}", name=n, kind="parameter", dtype="float32", shape=(2,))
        for i, n in enumerate(names)
    )
    stage = StageSpec(index=0, inputs=(), sources=(), outputs=(), targets=(), state=state)
    return ProgramSpec(
        inputs=(), constants=(), symbols={}, stages=(stage,), loss="", outputs=(), ties={},
        aliases=aliases or {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "stored"),
    [
        (["h.0.w", "wte.w"], ["h.0.w", "wte.w"]),
        (["transformer.h.0.w", "head.w"], ["h.0.w", "head.w"]),  # of the base model
        (["h.0.w", "wte.w"], ["module.h.0.w", "module.wte.w"]),  # of a model that was wrapped
        (["own.model.h.0.w", "own.model.h.1.w"], ["h.0.w", "h.1.w"]),
    ],
)
def test_prefixes(names: list[str], stored: list[str]) -> None:
    assert stored_names(program(names), stored) == dict(zip(names, stored, strict=True))


def test_a_tie_under_its_other_name() -> None:
    spec = program(["wte.w", "x.w"], {"lm_head.w": "wte.w"})
    assert stored_names(spec, ["lm_head.w", "x.w"]) == {"wte.w": "lm_head.w", "x.w": "x.w"}


def test_files_of_an_index_and_no_others(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(3, 4, 5) for i in range(5)}
    sharded(tmp_path, tensors, 2)
    save_file({"w0": torch.zeros(1)}, tmp_path / "optimizer.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)
        for part in [(1, 3), (0, 4), (0, 5)], [(0, 3), (1, 2), (2, 5)], [(2, 2), (0, 4), (0, 5)]:
            slices = tuple(slice(*bounds) for bounds in part)
            assert torch.equal(files.read_part(name, slices), tensor[slices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3).to(dtype), "b": torch.ones((), dtype=dtype)}
    save_file({**tensors, "none": torch.zeros(0, 3)}, tmp_path / "m.safetensors")
    files = TensorFiles(tmp_path / "m.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)
        assert files.dtype(name) == dtype
    assert files.read("none").shape == (0, 3)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"w": "../other.safetensors"}}, "outside the folder"),
        ({"weight_map": {"w": "gone.safetensors"}}, "cannot be read"),
        ({"weight_map": {"w": "m.safetensors", "v": "m.safetensors"}}, "such as v"),
        ({}, "not a valid checkpoint index"),
    ],
)
def test_wrong_indices(index: Any, why: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(FxpartError, match=why):
        TensorFiles(tmp_path)


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FxpartError, match="but the file has"):
        TensorFiles(path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["none", "tp=2"])
def test_a_rank_reads_its_part_alone(pool: Pool, mesh: str, tmp_path: Path) -> None:
    """210 MB in shards, the model never whole in any process: memory rises by the rank's own."""
    generator = torch.Generator().manual_seed(0)
    layers = {
        f"layers.{i}.weight": torch.rand(WIDTH, WIDTH, generator=generator) for i in range(LAYERS)
    }
    folder = str(sharded(tmp_path / "c", layers, 3))
    whole, largest = sum(t.nbytes for t in layers.values()), WIDTH * WIDTH * 4
    total = sum(float(t.sum()) for t in layers.values())
    del layers
    answers = pool.run(load, folder, mesh, ranks=2, timeout=120)
    assert sum(answer[2] for answer in answers) == pytest.approx(total, rel=1e-5)
    for rise, own, _ in answers:
        assert own == whole // 2
        assert rise <= own + largest + (8 << 20), f"{rise / 1e6:.0f} MB for {own / 1e6:.0f}"


@pytest.mark.slow
def test_every_rank_hears_what_one_misses(pool: Pool, tmp_path: Path) -> None:
    tensors = {"0.weight": torch.zeros(4, 4), "0.bias": torch.zeros(4), "2.bias": torch.zeros(5)}
    save_file(tensors, tmp_path / "m.safetensors")
    first, second = pool.run(wrong, str(tmp_path), ranks=2)
    assert first == second
    assert "stage 1" in first
    assert "2.weight" in first
    assert "[5]" in first


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [1 << 30, 8000])
def test_trained_at_two_ranks_and_loaded_by_transformers(
    pool: Pool, shard_bytes: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("old")
    names = pool.run(train_and_save, str(folder), shard_bytes, ranks=2, timeout=120)
    assert names[0] == names[1]
    assert {p.name for p in folder.iterdir()} == {*names[0], "tokenizer.json"}
    assert list(tmp_path.iterdir()) == [folder]
    sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
    assert (len(sizes) > 1) == (shard_bytes == 8000)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(2):
        optimizer.zero_grad()
        model(input_ids=ids(seed), labels=ids(seed)).loss.backward()
        optimizer.step()
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.config.use_cache == model.config.use_cache
    with torch.no_grad():
        a, b = loaded.eval()(ids(9)).logits, model.eval()(ids(9)).logits
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    assert "lm_head.weight" not in stored
