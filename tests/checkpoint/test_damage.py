"""Checkpoints changed in every way: it is noticed, the tensor named, the one before used."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoint_files import Sample
from checkpoint_killed import killed, left

from fxpart.checkpoint import folder, manifest_codec
from fxpart.checkpoint.manifest import (
    NAME,
    CheckpointManifest,
    ManifestFile,
    ManifestPart,
    ManifestTensor,
)
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import TensorRegion
from fxpart.errors import FxpartError, Problem


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the same layout and other bytes; each test puts back what it changes."""
    made = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        Sample.make(0, count=8).save(made, step, seed=7)
    return made


def newest(root: Path) -> Path:
    return folder.list_complete(root)[0]


def noticed(root: Path) -> tuple[Problem, ...]:
    """What is told of the newest; the one before is used."""
    found = folder.newest(root)
    assert found.manifest.step == 1, "the damage was not noticed"
    assert {problem.code for problem in found.skipped} == {"FXP510"}
    assert all("step-0000000001" in problem.fix for problem in found.skipped)
    return found.skipped


def owners(path: Path, name: str, at: int) -> set[str]:
    """The tensors that lose by a change at a byte of a file: one, or all where it is a header."""
    manifest = msgspec.json.decode((path / NAME).read_bytes(), type=CheckpointManifest)
    places = Checkpoint.open(path).entries.get(name, {})
    inside = {n for n, place in places.items() if place.start <= at < place.stop}
    return {
        key
        for key, tensor in manifest.tensors.items()
        for part in tensor.parts
        if part.file == name and (part.name in inside or not inside)
    }


def changed(root: Path, name: str, change: Callable[[bytearray], object], at: int) -> None:
    """Change a file of the newest checkpoint, look, and put it back."""
    path = newest(root)
    file, expected = path / name, owners(path, name, at)
    before = file.read_bytes()
    data = bytearray(before)
    change(data)
    file.write_bytes(data)
    try:
        problems = noticed(root)
    finally:
        file.write_bytes(before)
    assert all(name in problem.where for problem in problems), problems
    if expected:
        told = " ".join(problem.where for problem in problems)
        assert any(key in told for key in expected), (name, at, told)


def flip(at: int, bit: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[at] ^= 1 << bit

    return change


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte(tmp_path: Path) -> None:
    """Of a small checkpoint: headers, their padding, tensors, the manifest, the plan."""
    draw, count = random.Random(5), 0
    path = Sample.make(2, count=4, most=3).save(tmp_path, world=2)
    for file in sorted(path.iterdir()):
        before = file.read_bytes()
        for at in range(len(before)):
            expected = owners(path, file.name, at) if at % 40 == 0 else set()
            put(file, at, bytes([before[at] ^ 1 << draw.randrange(8)]))
            told = " ".join(problem.where for problem in problems(path))
            assert file.name in told, f"the damage at {at} of {file.name} was not noticed"
            assert not expected or any(key in told for key in expected)
            count += 1
            put(file, at, before[at : at + 1])
    assert count > 1000


def put(file: Path, at: int, data: bytes) -> None:
    """In place: a file written anew waits for the disk."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def problems(path: Path) -> list[Problem]:
    """What is told of a checkpoint that is looked at wholly."""
    try:
        return Checkpoint.open(path).verify()
    except FxpartError as fault:
        return list(fault.problems)


@pytest.mark.slow
def test_flipped_bits(root: Path) -> None:
    """Anywhere; and the checkpoint before is used."""
    draw = random.Random(5)
    for _ in range(200):
        file = draw.choice(sorted(newest(root).iterdir()))
        at = draw.randrange(file.stat().st_size)
        changed(root, file.name, flip(at, draw.randrange(8)), at)


@pytest.mark.slow
def test_truncations(root: Path) -> None:
    draw = random.Random(6)
    for _ in range(200):
        file = draw.choice(sorted(newest(root).iterdir()))
        size = draw.randrange(file.stat().st_size)
        changed(root, file.name, lambda data, size=size: data.__delitem__(slice(size, None)), -1)


def test_bytes_added(root: Path) -> None:
    for file in sorted(newest(root).iterdir()):
        changed(root, file.name, lambda data: data.append(0), -1)


def test_missing_renamed_and_exchanged_files(root: Path) -> None:
    path = newest(root)
    names = sorted(file.name for file in path.iterdir())
    for name in names:
        (path / name).rename(path / "kept")
        try:
            problems = noticed(root)
            assert all(name in problem.where for problem in problems)
        finally:
            (path / "kept").rename(path / name)
    for one, other in pairwise(names):
        exchange(path / one, path / other)
        try:
            noticed(root)
        finally:
            exchange(path / one, path / other)


def test_files_of_another_step(root: Path) -> None:
    """Of the same layout, even of the same numbers: they are not those that were written."""
    older, path = folder.list_complete(root)[1], newest(root)
    for name in sorted(file.name for file in path.iterdir() if file.name != "plan.json"):
        before = (path / name).read_bytes()
        (path / name).write_bytes((older / name).read_bytes())
        try:
            noticed(root)
        finally:
            (path / name).write_bytes(before)


def test_a_checkpoint_under_another_step(root: Path) -> None:
    path = newest(root)
    moved = path.rename(path.with_name("step-0000000009"))
    try:
        assert "of step 2" in noticed(root)[0].why
    finally:
        moved.rename(path)


def test_exchanged_tensors(root: Path) -> None:
    """Two parts of one size change places: in the data, and in the header."""
    path = newest(root)
    places = Checkpoint.open(path).entries
    pairs = [
        (name, one, other)
        for name, found in places.items()
        for a, one in found.items()
        for b, other in found.items()
        if a < b and one.size == other.size and one.size
    ]
    assert pairs

    for name, one, other in pairs:
        data = (path / name).read_bytes()
        first, second = data[one.start : one.stop], data[other.start : other.stop]
        if first == second:
            continue

        def swap(data: bytearray, one=one, other=other, first=first, second=second) -> None:  # type: ignore[no-untyped-def]
            data[one.start : one.stop], data[other.start : other.stop] = second, first

        changed(root, name, swap, one.start)


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


# -- files that are something else ----------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, "rank-00001.safetensors", "plan.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "loop"])
def test_what_is_no_file(root: Path, name: str, kind: str) -> None:
    path = newest(root)
    kept = (path / name).rename(path / "kept")
    try:
        if kind == "link":
            (path / name).symlink_to(kept)
        elif kind == "pipe":
            os.mkfifo(path / name)
        elif kind == "folder":
            (path / name).mkdir()
        else:
            (path / name).symlink_to(name)
        assert all(name in problem.where for problem in noticed(root))
    finally:
        (path / name).rmdir() if kind == "folder" else (path / name).unlink()
        kept.rename(path / name)


def signed(
    root: Path, change: Callable[[CheckpointManifest], CheckpointManifest]
) -> tuple[Problem, ...]:
    """What is told of a manifest that someone has changed, digest and all."""
    file = newest(root) / NAME
    before = file.read_bytes()
    file.write_bytes(manifest_codec.encode(change(manifest_codec.decode(before))))
    began = time.monotonic()
    try:
        return noticed(root)
    finally:
        file.write_bytes(before)
        assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "name", ["../step-0000000001/rank-00000.safetensors", "/etc/passwd", "a/b", ".", "..", "",
             ".hidden", "a\x00b", "a\nb", "\x1b[31m", "x" * 300, NAME]
)  # fmt: skip
def test_names_that_lead_elsewhere(root: Path, name: str) -> None:
    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        entry = manifest.files["rank-00000.safetensors"]
        return msgspec.structs.replace(manifest, files={**manifest.files, name: entry})

    (problem,) = signed(root, change)
    assert problem.why == "it is not a valid file name"
    assert problem.where.isprintable()


def with_part(
    part: ManifestPart, shape: tuple[int, ...] = (4,), dtype: str = "float32"
) -> Callable[[CheckpointManifest], CheckpointManifest]:
    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        return msgspec.structs.replace(
            manifest, tensors={**manifest.tensors, "model/w": ManifestTensor(dtype, shape, (part,))}
        )

    return change


FILE = "rank-00000.safetensors"
ALL = (((0, 4),),)
DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_part(ManifestPart("none.safetensors", "w", ALL, DIGEST)), "does not list"),
        (with_part(ManifestPart("../" + FILE, "w", ALL, DIGEST)), "does not list"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST)), "missing in the file"),
        (with_part(ManifestPart(FILE, "w", ALL, "short")), "digest"),
        (with_part(ManifestPart(FILE, "w", (((0, 9),),), DIGEST)), "dim 0"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST, (3, 90))), "are not within"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST), dtype="object"), "dtype is object"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST), shape=(-4,)), "shape"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST), shape=(1 << 62,)), "shape"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST), shape=(1 << 40,) * 60), "shape"),
        (with_part(ManifestPart(FILE, "w", ALL, DIGEST), shape=(2,) * 100_000), "shape"),
        (with_part(ManifestPart("plan.json", "w", ALL, DIGEST)), "missing in the file"),
    ],
)  # fmt: skip
def test_manifests_that_cannot_be(
    root: Path, change: Callable[[CheckpointManifest], CheckpointManifest], why: str
) -> None:
    assert why in signed(root, change)[0].why


def test_parts_that_do_not_cover(root: Path) -> None:
    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        tensors = dict(manifest.tensors)
        key = next(k for k, t in tensors.items() if len(t.parts) > 1 and np.prod(t.shape))
        held = [p for p in tensors[key].parts if TensorRegion(p.ranges, p.flat).elements]
        kept = tuple(held[1:])
        tensors[key] = msgspec.structs.replace(tensors[key], parts=kept)
        return msgspec.structs.replace(manifest, tensors=tensors)

    assert any("its parts contain" in problem.why for problem in signed(root, change))


def test_a_file_that_is_larger_than_is_listed(root: Path) -> None:
    def change(manifest: CheckpointManifest) -> CheckpointManifest:
        found = {n: ManifestFile(e.size + 1, e.header) for n, e in manifest.files.items()}
        return msgspec.structs.replace(manifest, files=found)

    assert len(signed(root, change)) == 4


# -- killed while saving --------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    """The newest complete one loads each time; `saving_killed.py` does it 100 times."""
    draw, step, generation = random.Random(3), 0, 0
    Sample.make(0, most=24).save(tmp_path, 0)
    while generation < 10 or step < 3:  # a busy machine saves less before it is killed
        generation += 1
        assert generation < 60
        killed(tmp_path, step + 1, generation, 2, draw.uniform(0.0, 0.4))
        found = left(tmp_path)
        assert found >= step
        assert len(folder.list_complete(tmp_path)) <= 3
        step = found
    folder.prune(tmp_path, 2, generation=generation + 1)
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


def test_reading_says_what_it_finds(root: Path) -> None:
    """Damage after the opening is found before a byte is used."""
    path = newest(root)
    checkpoint = Checkpoint.open(path)
    parts = checkpoint.manifest.tensors["model/h.3.weight"].parts
    name, place = max(
        ((p.file, checkpoint.entries[p.file][p.name]) for p in parts), key=lambda at: at[1].size
    )
    before = (path / name).read_bytes()
    data = bytearray(before)
    data[place.start] ^= 1
    (path / name).write_bytes(data)
    try:
        with pytest.raises(FxpartError, match=r"model/h\.3\.weight in rank"):
            checkpoint.read("model/h.3.weight")
        (path / name).write_bytes(data[: place.start])
        with pytest.raises(FxpartError, match="is truncated"):
            checkpoint.read("model/h.3.weight")
        (path / name).unlink()
        with pytest.raises(FxpartError, match="No such file"):
            checkpoint.read("model/h.3.weight")
    finally:
        (path / name).write_bytes(before)
