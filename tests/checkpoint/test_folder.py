"""The folder of checkpoints: what is complete, what is used, what goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_files import Sample, manifest

from fxpart.checkpoint import folder
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.writer import write_rank
from fxpart.errors import FxpartError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        Sample.make(step).save(tmp_path, step)
    return tmp_path


def damage(path: Path) -> None:
    """The last bit of a tensor."""
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_newest_first(root: Path) -> None:
    assert [folder.step_of(path) for path in folder.list_complete(root)] == [40, 30, 20, 10]
    found = folder.newest(root)
    assert found.manifest.step == 40 and found.skipped == ()
    assert folder.list_complete(root / "none") == []


def test_the_one_before_is_used_and_it_is_told(root: Path) -> None:
    damage(root / "step-0000000040")
    shutil.rmtree(root / "step-0000000030")
    (root / "step-0000000030").mkdir()
    found = folder.newest(root)
    assert found.manifest.step == 20
    first, second = found.skipped
    assert "step-0000000040, model/" in first.where and "rank-00000" in first.where
    assert "step-0000000030" in first.fix and "manifest.json" in second.where


def test_none_is_whole(root: Path) -> None:
    with pytest.raises(FxpartError, match="there is no checkpoint") as raised:
        folder.newest(root / "none")
    assert raised.value.code == "FXP511"
    for path in folder.list_complete(root):
        damage(path)
    with pytest.raises(FxpartError, match="all 4 checkpoints are damaged") as raised:
        folder.newest(root)
    assert [p.code for p in raised.value.problems] == ["FXP511", *["FXP510"] * 4]


def test_prune_keeps_the_newest_that_open(root: Path) -> None:
    (root / "step-0000000040" / "manifest.json").write_bytes(b"{}")
    gone = folder.prune(root, 2)
    assert [p.name for p in gone] == ["step-0000000010"]
    assert names(root) == ["step-0000000020", "step-0000000030", "step-0000000040"]
    damage(root / "step-0000000030")
    assert folder.prune(root, 2, verify=True) == []


def test_later_ones_do_not_count_after_going_back(root: Path) -> None:
    """A tensor of the newest is damaged, the run went back to 20 and has saved 25."""
    damage(root / "step-0000000040")
    damage(root / "step-0000000030")
    Sample.make(25).save(root, 25)
    gone = folder.prune(root, 2, step=25)
    assert [folder.step_of(path) for path in gone] == [10]
    assert [folder.step_of(path) for path in folder.list_complete(root)] == [40, 30, 25, 20]


def test_prune_and_unfinished_ones(root: Path) -> None:
    for generation in (1, 2, 3):
        folder.begin(root, 50, generation)
    (root / ".dropped-step-0000000005-1").mkdir()
    (root / ".damaged-step-0000000005-1").mkdir()
    (root / "mine").mkdir()
    there = names(root)
    gone = folder.prune(root, 2, generation=3, dry=True)
    assert names(root) == there and len(gone) == 6
    folder.prune(root, 2, generation=3)
    assert names(root) == [
        ".partial-g3-step-0000000050", "mine", "step-0000000030", "step-0000000040"
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        folder.prune(root, 1)


def test_links_are_removed_and_not_followed(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    elsewhere = Sample.make(1).save(other, 5)
    (root / "step-0000000005").symlink_to(elsewhere)
    (root / ".partial-g0-step-0000000005").symlink_to(other)
    assert Checkpoint.open(root / "step-0000000005").manifest.step == 5
    folder.prune(root, 2, generation=1)
    assert Checkpoint.open(elsewhere).verify() == []
    assert names(root) == ["step-0000000030", "step-0000000040"]


def test_a_link_is_not_written_through(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (tmp_path / ".partial-g0-step-0000000001").symlink_to(other)
    with pytest.raises(FxpartError, match="is a symbolic link"):
        folder.begin(tmp_path, 1, 0)
    partial = folder.begin(tmp_path, 2, 0)
    for name in ("rank-00000.safetensors", ".rank-00000.json.new"):
        (partial / name).symlink_to(other / "target")
        with pytest.raises(FxpartError) as raised:
            write_rank(partial, 0, [])
        assert raised.value.code == "FXP513"
    assert list(other.iterdir()) == []


def test_a_step_saved_again(root: Path) -> None:
    before = (root / "step-0000000040" / "manifest.json").read_bytes()
    Sample.make(99).save(root, 40, generation=7)
    assert (root / "step-0000000040" / "manifest.json").read_bytes() == before
    damage(root / "step-0000000040")
    Sample.make(99).save(root, 40, generation=7)
    assert folder.newest(root).manifest.generation == 7
    assert ".damaged-step-0000000040-1" in names(root)


def test_what_a_path_means(root: Path) -> None:
    run = root / "run"
    assert folder.find_checkpoints(root)[0].name == "step-0000000040"
    assert folder.find_checkpoints(root / "step-0000000010") == [root / "step-0000000010"]
    run.mkdir()
    with pytest.raises(FxpartError, match="FXP511"):
        folder.find_checkpoints(run)
    Sample.make(1).save(run / "checkpoints", 3)
    assert [p.name for p in folder.find_checkpoints(run)] == ["step-0000000003"]


def test_values_that_cannot_be_kept(tmp_path: Path) -> None:
    partial = folder.begin(tmp_path, 1, 0)
    made = manifest(partial, [write_rank(partial, 0, [])], 1)
    made.extra["loader"] = object()
    with pytest.raises(FxpartError, match=r"extra\.loader has the type object") as raised:
        folder.commit(partial, made)
    assert raised.value.code == "FXP513"
    assert folder.list_complete(tmp_path) == []
    folder.discard(partial)
    assert names(tmp_path) == []


@pytest.mark.parametrize("lost", [True, False])
def test_a_file_that_is_gone_before_the_end(tmp_path: Path, lost: bool) -> None:
    """Removed, or not seen whole by the rank that completes the checkpoint."""
    partial = folder.begin(tmp_path, 1, 0)
    written = [write_rank(partial, rank, []) for rank in range(2)]
    made = manifest(partial, written, 1)
    file = partial / written[1].file
    file.unlink() if lost else file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FxpartError, match=r"rank-00001\.safetensors") as raised:
        folder.commit(partial, made)
    assert raised.value.code == "FXP513"
    assert folder.list_complete(tmp_path) == []
