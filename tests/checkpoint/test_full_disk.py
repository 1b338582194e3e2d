"""Saving where there is no room, or no permission: a clear error, and nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import Sample, manifest

from fxpart.checkpoint import files, folder
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.writer import CheckpointShard, write_rank
from fxpart.errors import FxpartError

REPOSITORY = Path(__file__).resolve().parents[2]

# A process of its own: what it may write is limited, or it is another user.
SAVING = """
import os, resource, sys
from pathlib import Path
import numpy as np
from fxpart.checkpoint import folder
from fxpart.checkpoint.writer import CheckpointShard, write_rank
from fxpart.errors import FxpartError

root, limit, user = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
data = np.ones(3_000_000, np.uint8)
piece = CheckpointShard("model/w", "uint8", data.shape, (((0, len(data)),),), None, data)
try:
    partial = folder.begin(root, 2, 1)
    print(sorted(p.name for p in partial.iterdir()))
    write_rank(partial, 1, [piece])
except FxpartError as fault:
    print(fault)
    print(sorted(p.name for p in root.iterdir()))
    for partial in folder.list_unfinished(root):
        print(partial.name, sorted(p.name for p in partial.iterdir()))
"""


def save(root: Path, limit: int = 0, user: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAVING, str(root), str(limit), str(user)],
        capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    Sample.make(1).save(tmp_path, 1)
    told = save(tmp_path, limit=1_000_000)
    assert "FXP513" in told and "File too large" in told and "ulimit" in told and "rank 1" in told
    assert "'step-0000000001'" in told and ".partial-g1-step-0000000002 []" in told
    assert folder.newest(tmp_path).manifest.step == 1


@pytest.mark.slow
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    """The superuser may write everywhere: then the process is somebody else."""
    Sample.make(1).save(tmp_path, 1)
    tmp_path.chmod(0o555)
    parents = [p for p in tmp_path.parents if not p.stat().st_mode & 0o001]
    modes = {p: p.stat().st_mode for p in parents}
    try:
        if os.getuid() == 0:
            for parent in parents:
                parent.chmod(modes[parent] | 0o055)
        told = save(tmp_path, user=65534 if os.getuid() == 0 else 0)
    finally:
        tmp_path.chmod(0o755)
        for parent in parents:
            parent.chmod(modes[parent])
    assert "FXP513" in told and "Permission denied" in told and "make the folder writable" in told
    assert folder.newest(tmp_path).manifest.step == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB; only the superuser can make one."""
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=10, check=False)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("no file system can be mounted")
    try:
        yield root
    finally:
        subprocess.run(["umount", str(root)], timeout=10, check=True)


def piece(size: int) -> CheckpointShard:
    data = np.ones(size, np.uint8)
    return CheckpointShard("model/w", "uint8", (size,), (((0, size),),), None, data)


def test_a_full_disk(small: Path) -> None:
    """The next save has the room that the failed one took."""
    for step, size, fits in ((1, 300_000, True), (2, 900_000, False), (3, 300_000, True)):
        partial = folder.begin(small, step, 1)
        try:
            written = write_rank(partial, 0, [piece(size)])
            folder.commit(partial, manifest(partial, [written], step))
            assert fits
        except FxpartError as fault:
            assert not fits and fault.code == "FXP513"
            assert "No space left on device" in str(fault) and "free disk space" in str(fault)
            assert list(partial.iterdir()) == []
            folder.discard(partial)
    assert [folder.step_of(path) for path in folder.list_complete(small)] == [3, 1]
    assert folder.newest(small).manifest.step == 3


def fails_once(root: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> bool:
    """Save while one of all calls to the disk fails; whether there were so many."""
    calls = 0

    def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for owner, name in (
            (files, "write"), (os, "fsync"), (os, "open"),
            (Path, "rename"), (Path, "mkdir"), (Path, "unlink"),
        ):  # fmt: skip
            patched.setattr(owner, name, failing_once(getattr(owner, name)))
        try:
            Sample.make(2).save(root, 2, world=1)
        except FxpartError as fault:
            assert {problem.code for problem in fault.problems} == {"FXP513"}
            assert calls >= failing
    return calls >= failing


@pytest.mark.slow
def test_every_call_that_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a save asks the disk for the first fails, the second, ...: nothing is lost."""
    count = 1
    root = tmp_path / "0"
    while fails_once(prepared(root), monkeypatch, count):
        assert folder.newest(root).skipped == ()
        Sample.make(2).save(root, 3, generation=1)
        found = folder.newest(root)
        assert found.manifest.step == 3 and found.skipped == ()
        folder.prune(root, 2, generation=2)
        assert all(not path.name.startswith(".") for path in root.iterdir())
        root, count = tmp_path / str(count), count + 1
    assert count > 20


def prepared(root: Path) -> Path:
    Sample.make(1, count=3).save(root, 1)
    return root


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(FxpartError, match=r"Not a directory|File exists") as raised:
        folder.begin(tmp_path / "run", 1, 0)
    assert raised.value.code == "FXP513"


def test_a_rank_that_saves_again_begins_anew(tmp_path: Path) -> None:
    """What is left of an attempt before is never taken for this one's."""
    partial = folder.begin(tmp_path, 1, 0)
    write_rank(partial, 0, [piece(1000)])
    (partial / "rank-00000.safetensors").write_bytes(b"x")
    written = write_rank(partial, 0, [piece(10)])
    path = folder.commit(partial, manifest(partial, [written], 1))
    assert Checkpoint.open(path).verify() == []
