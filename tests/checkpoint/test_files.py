"""Checkpoints written and read: every region from every layout; the files as others see them."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoint_files import Sample, manifest, part, split
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.checkpoint import folder, manifest_codec, value_codec
from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.manifest_merge import list_missing_ranks, merge, read_rank_manifests
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import TensorRegion
from fxpart.checkpoint.writer import CheckpointShard, write_rank
from fxpart.errors import FxpartError


@pytest.mark.parametrize("seed", range(25))
def test_any_layout_from_any_other(tmp_path: Path, seed: int) -> None:
    sample, draw = Sample.make(seed), random.Random(seed)
    path = sample.save(tmp_path, world=draw.randint(1, 4), seed=seed)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.verify() == []
    assert sorted(checkpoint.manifest.tensors) == sorted(sample.tensors)
    for key, tensor in sample.tensors.items():
        assert (checkpoint.read(key) == tensor).all()
        for region in split(tensor.shape[:-1], draw):
            found = checkpoint.read(key, region)
            assert found.shape == (*region.sizes, tensor.shape[-1])
            assert (found == part(tensor, region)).all()


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    """By the library's own reader, which is strict about headers."""
    safetensors, torch = pytest.importorskip("safetensors.torch"), pytest.importorskip("torch")
    sample = Sample.make(1, count=40)
    path = sample.save(tmp_path, world=2)
    found = {f.name: safetensors.load_file(f) for f in path.glob("*.safetensors")}
    for key, tensor in Checkpoint.open(path).manifest.tensors.items():
        for each in tensor.parts:
            there, region = found[each.file][each.name], TensorRegion(each.ranges, each.flat)
            expected = part(sample.tensors[key], region).tobytes()
            assert there.reshape(-1).view(torch.uint8).numpy().tobytes() == expected
            if DTYPES[tensor.dtype][1] is not None:
                assert there.dtype == getattr(torch, tensor.dtype)
                assert tuple(there.shape) == region.sizes


def test_every_dtype_of_torch_that_has_whole_bytes() -> None:
    torch = pytest.importorskip("torch")
    for name, (size, _) in DTYPES.items():
        assert getattr(torch, name).itemsize == size


def test_two_parts_of_a_tensor_in_one_file(tmp_path: Path) -> None:
    data = np.arange(24, dtype=np.uint8).reshape(6, 4)
    halves = [
        CheckpointShard("model/w", "float32", (6,), (((a, a + 3),),), None, data[a : a + 3])
        for a in (0, 3)
    ]
    more = CheckpointShard("model/w#2", "uint8", (), (), None, b"x")
    partial = folder.begin(tmp_path, 1, 0)
    written = write_rank(partial, 0, [*halves, more])
    path = folder.commit(partial, manifest(partial, [written], 1))
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.read("model/w") == data).all()
    assert checkpoint.read("model/w#2").tobytes() == b"x"


def test_the_manifest_comes_back_whole(tmp_path: Path) -> None:
    path = Sample.make(3).save(tmp_path, 120)
    found = Checkpoint.open(path)
    kept = found.manifest
    assert (kept.step, kept.calls, kept.seed, kept.world) == (120, 123, 11, 3)
    assert kept.extra == {"epoch": 2, "best": float("inf")}
    assert kept.groups[0]["betas"] == (0.9, 0.95)
    assert found.plan() == '{"format":"none"}\n'
    assert sorted(p.name for p in path.iterdir()) == sorted([*kept.files, "manifest.json"])
    assert manifest_codec.decode(manifest_codec.encode(kept)) == kept


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(plain)
@settings(max_examples=120, deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = value_codec.from_json_value(
        msgspec.json.decode(msgspec.json.encode(value_codec.to_json_value(value)))
    )
    assert found == value and repr(found) == repr(value)  # 1, 1.0 and True are not the same


def test_values_that_json_lacks() -> None:
    state = np.random.default_rng(1).bit_generator.state
    assert value_codec.from_json_value(value_codec.to_json_value(state)) == state
    assert np.isnan(value_codec.from_json_value(value_codec.to_json_value(float("nan"))))
    assert value_codec.to_json_value({"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}
    with pytest.raises(TypeError, match=r"extra\.a\[1\] has the type object"):
        value_codec.to_json_value({"a": [1, object()]}, "extra")


@pytest.mark.slow
@given(st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["inf", "0x", "=="]),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["$int", "$float", "$bytes", "$tuple", "$items", "$other", "a"]), inner
    ),
    max_leaves=12,
))  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_strange_values_are_refused_in_one_way(value: Any) -> None:
    try:
        value_codec.from_json_value(value)
    except ValueError:
        pass


def test_ranks_that_do_not_fit_together(tmp_path: Path) -> None:
    partial = folder.begin(tmp_path, 1, 0)
    one = CheckpointShard("model/w", "float32", (2,), (((0, 1),),), None, b"1234")
    other = CheckpointShard("model/w", "float16", (2,), (((1, 2),),), None, b"12")
    write_rank(partial, 0, [one])
    assert list_missing_ranks(partial, 2) == [1]
    with pytest.raises(FxpartError, match="rank 1") as raised:
        read_rank_manifests(partial, 2)
    assert raised.value.code == "FXP513"
    write_rank(partial, 1, [other])
    assert list_missing_ranks(partial, 2) == []
    rest: dict[str, Any] = {"step": 1, "calls": 1, "seed": 0, "generation": 0}
    rest |= {"fingerprint": "", "plan": ""}
    with pytest.raises(FxpartError, match="float16"):
        merge(read_rank_manifests(partial, 2), **rest)
    with pytest.raises(FxpartError, match="contain 1 of 2 elements"):
        merge(read_rank_manifests(partial, 1), **rest)


def test_a_share_of_the_comparison_for_each_rank(tmp_path: Path) -> None:
    path = Sample.make(8, count=30).save(tmp_path)
    checkpoint = Checkpoint.open(path)
    total = sum(t.nbytes for t in Sample.make(8, count=30).tensors.values())
    seen = []
    for which in range(4):
        checkpoint.verify(lambda done, of: seen.append((done, of)), share=(which, 4))
    last = [done for done, of in seen if done == of]
    assert sum(set(last)) == total or sum(last) >= total
    file = path / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert sum(len(checkpoint.verify(share=(which, 4))) for which in range(4)) == 1


@pytest.mark.slow
def test_writing_lets_other_threads_run(tmp_path: Path) -> None:
    """While 200 MB are hashed and written a loop beside makes progress."""
    data = np.zeros(200_000_000, np.uint8)
    piece = CheckpointShard("model/w", "uint8", (len(data),), (((0, len(data)),),), None, data)
    partial = folder.begin(tmp_path, 1, 0)
    thread = threading.Thread(target=write_rank, args=(partial, 0, [piece]))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        thread.join(0.001)
    assert turns > 50


def test_a_checkpoint_of_another_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(Sample.make(1).save(tmp_path))
    with pytest.raises(FxpartError) as raised:
        checkpoint.read("model/none")
    assert raised.value.code == "FXP512"


@pytest.mark.slow
def test_one_part_at_a_time(tmp_path: Path) -> None:
    """Beside what is asked for; and to compare less than that."""
    count, rows = 8, 500_000
    data = np.random.default_rng(0).integers(0, 256, (count * rows, 4), dtype=np.uint8)
    partial = folder.begin(tmp_path, 1, 0)
    written = []
    for rank in range(count):
        mine = (rank * rows, (rank + 1) * rows)
        piece = CheckpointShard(
            "model/w", "float32", (count * rows,), ((mine,),), None, data[slice(*mine)]
        )
        written.append(write_rank(partial, rank, [piece]))
    checkpoint = Checkpoint.open(folder.commit(partial, manifest(partial, written, 1)))
    part = data.nbytes // count

    def peak(call: Callable[[], object]) -> int:
        tracemalloc.start()
        call()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    third = TensorRegion((((rows // 2, 3 * rows),),))
    assert peak(lambda: checkpoint.read("model/w")) < data.nbytes + 1.1 * part
    assert peak(lambda: checkpoint.read("model/w", third)) < 2.5 * part + 1.1 * part
    assert peak(checkpoint.verify) < part
    assert (checkpoint.read("model/w", third) == data[rows // 2 : 3 * rows]).all()
