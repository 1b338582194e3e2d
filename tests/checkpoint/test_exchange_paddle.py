"""PaddlePaddle's dictionaries, compared with merging and slicing written here as Paddle does it."""

from __future__ import annotations

import itertools
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_sources import REST, Numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.checkpoint.exchange.conversion import convert
from fxpart.checkpoint.exchange.npz import NpzArrays
from fxpart.checkpoint.exchange.paddle import PaddleStrategy, strategy_of
from fxpart.checkpoint.exchange.paddle_files import PaddleFolder, read_strategies, write_paddle
from fxpart.checkpoint.exchange.source import RankShard, TensorType
from fxpart.errors import FxpartError

Attr = dict[str, Any]


def slices(whole: np.ndarray, attr: Attr) -> dict[int, np.ndarray]:
    """Each rank's part, dim by dim and number by number: number i of n lies in part i * k // n."""
    shape, mapping = attr["process_shape"], attr["dims_mapping"]
    found = {}
    for rank, at in zip(attr["process_group"], itertools.product(*map(range, shape)), strict=True):
        part = whole
        for dim, axis in enumerate(mapping):
            if axis != -1:
                n, k = whole.shape[dim], shape[axis]
                part = part.take([i for i in range(n) if i * k // n == at[axis]], axis=dim)
        found[rank] = part
    return found


def merged(parts: list[np.ndarray], attr: Attr) -> np.ndarray:
    """Neighbours glued together until one array is left: axis after axis, as Paddle does."""
    shape, mapping = attr["process_shape"], attr["dims_mapping"]
    grid: dict[tuple[int, ...], np.ndarray] = dict(
        zip(itertools.product(*map(range, shape)), parts, strict=True)
    )
    for axis in reversed(range(len(shape))):
        rows: dict[tuple[int, ...], list[np.ndarray]] = {}
        for at, part in sorted(grid.items()):
            rows.setdefault(at[:axis], []).append(part)
        dim = mapping.index(axis) if axis in mapping else None
        grid = {
            at: row[0] if dim is None else np.concatenate(row, axis=dim) for at, row in rows.items()
        }
    return grid[()]


@st.composite
def cut_tensors(draw) -> tuple[tuple[int, ...], Attr]:
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = draw(st.integers(0, 3))
    axes = draw(st.permutations([*range(len(mesh)), *[-1] * dims]))
    mapping = list(axes[:dims])
    shape = tuple(draw(st.integers(0, 3)) * (mesh[axis] if axis != -1 else 1) for axis in mapping)
    ranks = draw(st.permutations(range(np.prod(mesh) + 2)))
    group = [int(r) for r in ranks[: np.prod(mesh)]]
    return shape, {"process_shape": mesh, "process_group": group, "dims_mapping": mapping}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(cut_tensors(), min_size=1, max_size=3), st.sampled_from(["float32", "bfloat16"]))
def test_any_cut(cuts, dtype) -> None:
    """Written by any dictionary, the parts are Paddle's; read, they are the whole again."""
    outlines = {f"model/w{i}": TensorType(dtype, shape) for i, (shape, _) in enumerate(cuts)}
    attrs = {f"w{i}": attr for i, (_, attr) in enumerate(cuts)}
    numbers = Numbers(outlines)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        (Path(folder) / "in.json").write_text(json.dumps(attrs))
        chosen = read_strategies(Path(folder) / "in.json")
        assert write_paddle(target, numbers, strategies=chosen) == []
        kind = np.uint16 if dtype == "bfloat16" else np.float32
        for name, attr in attrs.items():
            whole = (
                numbers.read(f"model/{name}").view(kind).reshape(outlines[f"model/{name}"].shape)
            )
            parts = []
            for rank, part in slices(whole, attr).items():
                with np.load(target / f"model_dist{rank}.pdparams.npz", allow_pickle=False) as held:
                    parts.append(held[name])
                assert parts[-1].tobytes() == part.tobytes() and parts[-1].shape == part.shape
                told = json.loads((target / f"model_dist{rank}.pdattr.json").read_text())
                assert told[name] == attr
            assert merged(parts, attr).tobytes() == whole.tobytes()
        found = PaddleFolder(target)
        assert found.tensors == outlines and found.rest == REST
        for key in outlines:
            assert found.read(key).tobytes() == numbers.data[key].tobytes()


def test_the_example_of_paddles_own_documentation(tmp_path: Path) -> None:
    whole = np.arange(4).reshape([2, 2])
    attr = {"process_shape": [2], "process_group": [0, 1], "dims_mapping": [0, -1]}
    for rank, part in enumerate(np.split(whole, 2, axis=0)):
        np.savez(tmp_path / f"gpt_dist{rank}.pdparams.npz", tmp_0=part)
        (tmp_path / f"gpt_dist{rank}.pdattr.json").write_text(json.dumps({"tmp_0": attr}))
    found = PaddleFolder(tmp_path)
    assert found.tensors == {"model/tmp_0": TensorType("int64", (2, 2))}
    assert found.read("model/tmp_0").tobytes() == whole.tobytes()
    out = convert(tmp_path, tmp_path / "out", "whole")
    assert out.source == "paddle"


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a.astype(">f4")])
def test_any_array_that_numpy_writes(tmp_path: Path, make) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.savez(tmp_path / "a.npz", w=make(array), bits=np.array([1, 2], np.uint16), s=np.float32(2))
    found = NpzArrays(tmp_path / "a.npz")
    assert found.tensor_types["w"] == TensorType("float32", (3, 4))
    assert found.read("w").tobytes() == array.tobytes()
    assert found.tensor_types["bits"] == TensorType("bfloat16", (2,))
    assert found.tensor_types["s"] == TensorType("float32", ())


def test_optimizer_state_is_cut_as_its_parameter(tmp_path: Path) -> None:
    outlines = {
        "model/w": TensorType("float32", (4, 2)),
        "optimizer/w/exp_avg": TensorType("float32", (4, 2)),
        "optimizer/w/step": TensorType("float32", ()),
    }
    numbers = Numbers(outlines)
    write_paddle(tmp_path / "out", numbers, strategies={"w": PaddleStrategy((2,), (0, 1), (0, -1))})
    with np.load(tmp_path / "out" / "model_dist1.pdopt.npz", allow_pickle=False) as held:
        assert set(held) == {"w/exp_avg"} and held["w/exp_avg"].shape == (2, 2)
    found = PaddleFolder(tmp_path / "out")
    assert {key: found.read(key).tobytes() for key in outlines} == {
        key: data.tobytes() for key, data in numbers.data.items()
    }


def test_layouts_of_ranks() -> None:
    grid = [
        RankShard(2 * i + j, ((i * 2, i * 2 + 2), (j * 3, j * 3 + 3)))
        for i in (0, 1)
        for j in (0, 1)
    ]
    assert strategy_of((4, 6), grid) == PaddleStrategy((2, 2), (0, 1, 2, 3), (0, 1))
    assert strategy_of((4, 6), [RankShard(3, ((0, 4), (0, 6)))]) == PaddleStrategy(
        (1,), (3,), (-1, -1)
    )
    assert strategy_of((5,), [RankShard(0, ((0, 3),)), RankShard(1, ((3, 5),))]) is None
    assert strategy_of((4,), [RankShard(0, ((0, 2),)), RankShard(0, ((2, 4),))]) is None
    assert strategy_of((4, 6), grid[:3]) is None and strategy_of((4,), []) is None
    swapped = [
        RankShard(1 - each.rank, each.box)
        for each in [RankShard(0, ((0, 2),)), RankShard(1, ((2, 4),))]
    ]
    assert strategy_of((4,), swapped) == PaddleStrategy((2,), (1, 0), (0,))


def small(folder: Path, attr: Any, **arrays: Any) -> None:
    np.savez(folder / "m_dist0.pdparams.npz", **arrays)
    (folder / "m_dist0.pdattr.json").write_text(attr if isinstance(attr, str) else json.dumps(attr))


WHOLE = {"process_shape": [1], "process_group": [0], "dims_mapping": [-1]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"process_shape": [2]}, "process_group has 1 ranks"),
        ({"process_shape": [0]}, "process_group has"),
        ({"process_shape": []}, "process_group has"),
        ({"process_shape": [10**30, 10**30]}, ""),
        ({"process_group": [-1]}, "duplicate or negative ranks"),
        ({"process_group": [5]}, "missing on ranks [5]"),
        (
            {"process_group": [0, 1], "process_shape": [2], "dims_mapping": [0]},
            "missing on ranks [1]",
        ),
        ({"dims_mapping": [0, -1]}, "dims_mapping is for 2 dims"),
        ({"dims_mapping": [1]}, "duplicate or unknown mesh axes"),
        ({"dims_mapping": [-2]}, "duplicate or unknown mesh axes"),
        ({"dims_mapping": ["0"]}, "no converter dictionaries"),
        ({"more": 1}, "no converter dictionaries"),
    ],
)
def test_dictionaries_that_do_not_fit(tmp_path: Path, change, why) -> None:
    small(tmp_path, {"w": WHOLE | change}, w=np.zeros(4))
    with pytest.raises(FxpartError) as fault:
        PaddleFolder(tmp_path)
    assert fault.value.code == "FXP110" and why in str(fault.value)


@pytest.mark.parametrize("text", ["", "[]", '{"w": 1}', "[" * 100_000, '{"w": null}', "\udc80"])
def test_texts_that_are_none(tmp_path: Path, text: str) -> None:
    small(tmp_path, {}, w=np.zeros(4))
    (tmp_path / "m_dist0.pdattr.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FxpartError, match="FXP110"):
        PaddleFolder(tmp_path)


class Evil:
    """Would write a file if it were unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    written = tmp_path / "written"
    small(tmp_path, {"w": WHOLE}, w=np.array([Evil(written)], dtype=object))
    with pytest.raises(FxpartError, match="pickled"):
        PaddleFolder(tmp_path)
    assert not written.exists()


@pytest.mark.slow
def test_archives_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "m_dist0.pdparams.npz"
    small(tmp_path, {"w": WHOLE}, w=np.zeros(40))
    whole = file.read_bytes()
    np.savez_compressed(file, w=np.zeros(1_000_000))
    with pytest.raises(FxpartError, match="compressed"):
        PaddleFolder(tmp_path)
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("../../etc/passwd.npy", b"x")
    with pytest.raises(FxpartError, match="FXP110"):
        PaddleFolder(tmp_path)
    header = b"\x93NUMPY\x01\x00v\x00" + b"(" * 117 + b"\n"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("w.npy", header)
    with pytest.raises(FxpartError, match="FXP110"):
        PaddleFolder(tmp_path)
    draw = np.random.default_rng(0)
    for _ in range(400):
        data = bytearray(whole)
        if draw.random() < 0.3:
            del data[int(draw.integers(len(data))) :]
        else:
            for at in draw.integers(len(data), size=3):
                data[at] = draw.integers(256)
        file.write_bytes(data)
        try:
            found = PaddleFolder(tmp_path)
            assert found.read("model/w").nbytes <= 1000
        except FxpartError as fault:
            assert fault.code == "FXP110"
