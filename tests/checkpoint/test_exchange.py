"""Checkpoints in other formats and back: every bit, and nothing of a damaged file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exchange_sources import MORE, OUTLINES, REST, Numbers, checkpoint, same
from safetensors.numpy import load_file, save_file

from fxpart.checkpoint.exchange import huggingface, native, paddle_files, single_file
from fxpart.checkpoint.exchange.conversion import ConversionOptions, convert, detect
from fxpart.checkpoint.exchange.huggingface import BARE, KeyPrefixes, SafetensorsFolder
from fxpart.checkpoint.exchange.source import (
    CheckpointMetadata,
    TensorType,
    format_metadata,
    parse_metadata,
)
from fxpart.checkpoint.reader import Checkpoint
from fxpart.errors import FxpartError

CUTS = {
    "model/h.0.weight": [(r, (((0, 6),), ((2 * r, 2 * r + 2),))) for r in (0, 1)],
    "model/häd.weight": [(0, (((0, 1), (2, 3)), ((0, 2),), ((0, 5),))),
                         (1, (((1, 2),), ((0, 2),), ((0, 5),)))],
    "optimizer/h.0.weight/exp_avg": [(3, (((0, 6),), ((0, 4),)))],
}  # fmt: skip


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "run", Numbers(OUTLINES | MORE), CUTS)


@pytest.mark.parametrize("to", ["whole", "fxpart", "dcp", "paddle", "hf"])
def test_there_and_back(tmp_path: Path, ours: Path, to) -> None:
    """What a format can hold comes back bit by bit, the rest is told."""
    there = convert(ours, tmp_path / "there", to)
    assert detect(tmp_path / "there") == to
    back = convert(tmp_path / "there", tmp_path / "back", "fxpart", form=to)
    numbers = Numbers(OUTLINES | MORE)
    lost = {
        "whole": [], "fxpart": [],
        "dcp": list(MORE), "paddle": ["random/0/torch", "buffer/seen"],
        "hf": [k for k in OUTLINES if k.startswith("optimizer/")] + list(MORE),
    }[to]  # fmt: skip
    assert sorted(there.left_out) == sorted(lost)
    same(native.NativeCheckpointSource(back.path), numbers, left_out=lost)
    found = Checkpoint.open(back.path)
    assert not found.verify() and found.path.name == back.path.name
    rest = native.NativeCheckpointSource(back.path).rest
    assert rest == (REST if to != "hf" else CheckpointMetadata())
    assert there.tensors == len(OUTLINES | MORE) - len(lost)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, ours: Path) -> None:
    for to in ("whole", "dcp", "paddle", "hf"):
        for name in ("a", "b"):
            convert(ours, tmp_path / to / name, to)  # type: ignore[arg-type]
        paths = [tmp_path / to / name for name in ("a", "b")]
        if to == "whole":
            assert paths[0].read_bytes() == paths[1].read_bytes()
            continue
        files = [sorted(path.iterdir()) for path in paths]
        assert [f.name for f in files[0]] == [f.name for f in files[1]]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    numbers = Numbers({k: o for k, o in OUTLINES.items() if o.dtype not in ("bfloat16",)})
    single_file.write_whole(tmp_path / "all.safetensors", numbers)
    found = load_file(tmp_path / "all.safetensors")
    for key, outline in numbers.tensors.items():
        assert found[key].shape == outline.shape and found[key].dtype == outline.dtype
        assert found[key].tobytes() == numbers.data[key].tobytes()


def test_large_folders_are_several_files(tmp_path: Path) -> None:
    numbers = Numbers(OUTLINES)
    huggingface.write_folder(tmp_path / "hf", numbers, file_bytes=100)
    index = json.loads((tmp_path / "hf" / huggingface.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(
        o.size for k, o in OUTLINES.items() if k.startswith("model/")
    )
    left = [k for k in OUTLINES if k.startswith("optimizer/")]
    same(SafetensorsFolder(tmp_path / "hf"), numbers, left_out=left)


def test_names_lead_back() -> None:
    names = KeyPrefixes()
    for key in ("model/h.0.weight", "optimizer/h.0.weight/exp_avg"):
        assert names.key(names.name(key)) == key and names.holds(key)
    assert names.name("optimizer/h.0.weight/exp_avg") == "optimizer.state.h.0.weight.exp_avg"
    assert not names.holds("optimizer/h.0.weight/a.b") and not BARE.holds("optimizer/w/step")
    assert names.key("lm_head.weight") is None and BARE.key("model.x") == "model/model.x"


def shards(folder: Path, parts: dict[str, list[tuple[list[int], np.ndarray]]]) -> None:
    """Files as ranks save them: the n-th part of each tensor in the n-th."""
    folder.mkdir()
    for rank in range(max(map(len, parts.values()))):
        mine = {name: held[rank] for name, held in parts.items() if rank < len(held)}
        told = {name: {"saved_offsets": offsets} for name, (offsets, _) in mine.items()}
        save_file(
            {name: np.ascontiguousarray(array) for name, (_, array) in mine.items()},
            folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(told)},
        )


def test_parts_of_ranks(tmp_path: Path) -> None:
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    parts = [([i, j], array[i : i + 3, j : j + 4]) for i in (0, 3) for j in (0, 4)]
    shards(tmp_path / "dcp", {"w": parts, "b": [([0], array[0])] * 2})
    found = SafetensorsFolder(tmp_path / "dcp")
    assert found.tensors["model/w"] == TensorType("float32", (5, 7))
    assert found.read("model/w").tobytes() == array.tobytes()
    assert found.read("model/b").tobytes() == array[0].tobytes()


@pytest.mark.parametrize(
    "parts",
    [
        [([0], 0, 3), ([4], 4, 7)],  # a hole
        [([0], 0, 4), ([3], 3, 7)],  # one number twice
        [([0], 0, 4), ([4], 4, 8), ([2], 2, 6)],
        [([1], 0, 7)],  # the beginning is missing
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, parts) -> None:
    array = np.arange(8, dtype=np.int64)
    shards(tmp_path / "dcp", {"w": [(at, array[a:b]) for at, a, b in parts]})
    with pytest.raises(FxpartError, match="or overlap") as fault:
        SafetensorsFolder(tmp_path / "dcp")
    assert fault.value.code == "FXP110" and "w in " in str(fault.value)


@pytest.mark.parametrize(
    "told",
    ["[]", "{}", '{"w": 1}', '{"w": {"saved_offsets": [0, 0]}}', '{"w": {"saved_offsets": [-1]}}',
     '{"w": {"saved_offsets": [true]}}', '{"w": {"saved_offsets": ["0"]}}', "[" * 100_000,
     '{"w": {"saved_offsets": [1e400]}}', '{"w": {"saved_offsets": [99999999999999999999]}}'],
)  # fmt: skip
def test_places_that_are_none(tmp_path: Path, told: str) -> None:
    (tmp_path / "dcp").mkdir()
    file = tmp_path / "dcp" / "a.safetensors"
    save_file({"w": np.zeros(4)}, file, {"DCP_SHARDING_INFO": told})
    with pytest.raises(FxpartError) as fault:
        SafetensorsFolder(tmp_path / "dcp")
    assert fault.value.code == "FXP110"


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"w": np.zeros(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FxpartError, match="w is also in another file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"w": 1}}', '{"weight_map": {}}',
     '{"weight_map": {"w": "../a.safetensors"}}', '{"weight_map": {"w": ".."}}',
     '{"weight_map": {"w": "a\\u0000"}}', '{"weight_map": {"w": "/etc/passwd"}}',
     '{"weight_map": {"w": ["a"]}}', "[" * 100_000,
     '{"weight_map": {"w": "a.safetensors", "b": "a.safetensors"}}'],
)  # fmt: skip
def test_indices_that_are_none(tmp_path: Path, index: str) -> None:
    save_file({"w": np.zeros(4)}, tmp_path / "a.safetensors")
    (tmp_path / huggingface.INDEX).write_text(index)
    with pytest.raises(FxpartError) as fault:
        SafetensorsFolder(tmp_path)
    assert fault.value.code == "FXP110"


def test_links_are_followed(tmp_path: Path) -> None:
    """A Hugging Face cache is made of them; a device at their end is no file."""
    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones(4)}, tmp_path / "blob")
    (tmp_path / "hf" / "model.safetensors").symlink_to("../blob")
    assert SafetensorsFolder(tmp_path / "hf").read("model/w").tobytes() == np.ones(4).tobytes()
    for target in ("/dev/zero", "model.safetensors", "nothing"):
        (tmp_path / "hf" / "model.safetensors").unlink()
        (tmp_path / "hf" / "model.safetensors").symlink_to(target)
        with pytest.raises(FxpartError, match="FXP110"):
            SafetensorsFolder(tmp_path / "hf")


def test_names_without_their_prefix(tmp_path: Path) -> None:
    shards(tmp_path / "dcp", {"lm_head.weight": [([0], np.zeros(4))]})
    with pytest.raises(FxpartError, match="--model-prefix"):
        convert(tmp_path / "dcp", tmp_path / "out", "whole")
    bare = ConversionOptions(prefixes=KeyPrefixes("", ""))
    assert convert(tmp_path / "dcp", tmp_path / "out", "whole", options=bare).tensors == 1


def test_what_is_there_stays(tmp_path: Path, ours: Path) -> None:
    for to in ("whole", "hf", "dcp", "paddle"):
        target = tmp_path / f"{to}-there"
        target.mkdir()
        (target / "mine").write_text("x")
        with pytest.raises(FxpartError, match="already exists"):
            convert(ours, target, to)  # type: ignore[arg-type]
        assert [p.name for p in target.iterdir()] == ["mine"]
    with pytest.raises(FxpartError, match="a checkpoint of that step"):
        convert(ours, ours.parent, "fxpart")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_damage_is_found_while_converting(tmp_path: Path, ours: Path) -> None:
    file = ours / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FxpartError, match="rank-00001") as fault:
        convert(ours, tmp_path / "out", "hf")
    assert fault.value.code == "FXP510"
    assert not (tmp_path / "out").exists() and {p.name for p in tmp_path.iterdir()} == {"run"}


def test_no_pickle_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")
    (folder / "__0_0.distcp").write_bytes(b"\x80\x04garbage")
    with pytest.raises(FxpartError, match="pickles are not supported"):
        detect(folder)
    with pytest.raises(FxpartError, match="path does not exist"):
        detect(tmp_path / "nothing")


def test_rest_comes_back() -> None:
    assert parse_metadata(format_metadata(REST), "x") == REST
    for text in ("", "[]", "[" * 100_000, '{"step": "a"}', '{"values": {"a": {"$int": 1}}}'):
        with pytest.raises(FxpartError, match="FXP110"):
            parse_metadata(text, "x")


@pytest.mark.slow
def test_one_tensor_in_memory(tmp_path: Path) -> None:
    """Sixteen tensors of 2 MB: what is held at a time is a few of them."""
    import tracemalloc

    outlines = {f"model/w{i}": TensorType("float32", (512, 1024)) for i in range(16)}
    ours = checkpoint(tmp_path / "run", Numbers(outlines), {})
    for to, most in (("hf", 2.5), ("whole", 2.5), ("paddle", 4.5)):
        tracemalloc.start()
        convert(ours, tmp_path / to, to)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most * 2_097_152, (to, peak / 2_097_152)


def test_paddle_lies_as_it_lay(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "paddle", "paddle")
    found = paddle_files.read_strategies(tmp_path / "paddle" / "model_dist1.pdattr.json")
    assert found["h.0.weight"].dims_mapping == (-1, 0)
    assert found["h.0.weight"].process_group == (0, 1)
    assert "häd.weight" not in found  # its parts are no even grid: whole on rank 0
