"""Copies of checkpoints in memory: on two machines, brought together again from those left."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from exchange_sources import Numbers, checkpoint
from hand_stages import batch, language
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool
from runtime_programs import make

from fxpart.checkpoint import files
from fxpart.checkpoint.exchange.source import CheckpointMetadata, TensorType
from fxpart.checkpoint.reader import Checkpoint
from fxpart.errors import FxpartError
from fxpart.runtime import StepInfo
from fxpart.runtime.checkpointing.memory_replicas import CheckpointReplicas
from fxpart.runtime.checkpointing.memory_store import MemoryCheckpointStore, default_root
from fxpart.runtime.checkpointing.replica_selection import (
    CheckpointMemoryInventory,
    select_checkpoint,
)
from fxpart.runtime.training_run import Checkpoints
from fxpart.runtime.transport.in_process import InProcess
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

HOSTS = ("a", "a", "b", "b")


def saved(root: Path, step: int) -> Path:
    """A checkpoint of four ranks, with a tensor on each."""
    outlines = {
        f"model/w{rank}": TensorType("float32", (50, 10 + rank + step)) for rank in range(4)
    }
    numbers = Numbers(outlines, CheckpointMetadata(step=step, plan_text="plan", plan="p"))
    cuts = {f"model/w{rank}": [(rank, (((0, 50),), ((0, 10 + rank + step),)))] for rank in range(4)}
    return checkpoint(root, numbers, cuts)


def kept(root: str, steps: list[int], hosts: list[str]) -> list[Any]:
    """On each rank: keep copies of those checkpoints."""
    transport = ProcessGroupTransport()
    me = transport.local[0]
    copies = CheckpointReplicas(Path(root) / hosts[me], hosts[me], hosts, transport, patience=10)
    for step in steps:
        path = Path(root) / "disk" / f"step-{step:010d}"
        copies.keep(step, path, Checkpoint.open(path).manifest)
        transport.exchange([0])  # as a Saver does before the next
    found = [copies.kept, [str(problem) for problem in copies.problems]]
    copies.close()
    transport.close()
    return found


def gathered(root: str, hosts: list[str], at_least: int = -1) -> list[Any]:
    """On each rank: what is brought together, and whether it is whole."""
    transport = ProcessGroupTransport()
    me = transport.local[0]
    copies = CheckpointReplicas(Path(root) / hosts[me], hosts[me], hosts, transport, patience=10)
    path = copies.gather(at_least)
    copies.close()
    transport.close()
    if path is None:
        return [None, [str(problem) for problem in copies.problems]]
    assert path.parent == Path(root) / hosts[me]
    opened = Checkpoint.open(path)
    return [opened.manifest.step, [str(p) for p in opened.verify()]]


@pytest.mark.slow
def test_either_machine_is_enough(tmp_path: Path, pool: Pool) -> None:
    for step in (5, 10, 15):
        saved(tmp_path / "disk", step)
    answers = pool.run(kept, str(tmp_path), [5, 10, 15], list(HOSTS), ranks=4)
    assert answers == [[15, []]] * 4
    shutil.rmtree(tmp_path / "disk")
    for host in "ab":  # the last two, and every file of them, on both machines
        names = {path.name[:15] for path in (tmp_path / host).iterdir()}
        assert names == {"step-0000000010", "step-0000000015"}
        shutil.copytree(tmp_path / host, tmp_path / f"kept-{host}")
    for lost in "ab":
        for host in "ab":
            shutil.rmtree(tmp_path / host)
            if host != lost:
                shutil.copytree(tmp_path / f"kept-{host}", tmp_path / host)
        assert pool.run(gathered, str(tmp_path), list(HOSTS), ranks=4) == [[15, []]] * 4
        # The machine that was lost has all of it now: the other may go.
        found = pool.run(gathered, str(tmp_path), ["c", lost], ranks=2)
        assert found == [[15, []]] * 2
        shutil.rmtree(tmp_path / "c")
        assert pool.run(gathered, str(tmp_path), list(HOSTS), 16, ranks=4) == [[None, []]] * 4


@pytest.mark.slow
def test_of_three_machines_any_one_may_go(tmp_path: Path, pool: Pool) -> None:
    hosts = ["a", "b", "b", "c"]
    saved(tmp_path / "disk", 5)
    assert pool.run(kept, str(tmp_path), [5], hosts, ranks=4) == [[5, []]] * 4
    for host in "abc":
        shutil.copytree(tmp_path / host, tmp_path / f"kept-{host}")
    for lost in itertools.chain("abc", ("ab",)):
        for host in "abc":
            shutil.rmtree(tmp_path / host)
            if host not in lost:
                shutil.copytree(tmp_path / f"kept-{host}", tmp_path / host)
        answer = [5, []] if len(lost) == 1 else [None, []]
        assert pool.run(gathered, str(tmp_path), hosts, ranks=4) == [answer] * 4


@pytest.mark.slow
def test_what_cannot_be_kept_is_said(tmp_path: Path, pool: Pool) -> None:
    saved(tmp_path / "disk", 5)
    (tmp_path / "b").mkdir(mode=0o755)  # others may look into it
    answers = pool.run(kept, str(tmp_path), [5], list(HOSTS), ranks=4)
    assert [answer[0] for answer in answers] == [-1] * 4
    assert all("FXP513" in " ".join(answer[1]) for answer in answers)
    assert "cannot store" in answers[0][1][0] and "not private" in answers[2][1][0]
    assert pool.run(gathered, str(tmp_path), list(HOSTS), ranks=4)[0][0] is None


def test_one_process(tmp_path: Path) -> None:
    path = saved(tmp_path / "disk", 5)
    copies = CheckpointReplicas(tmp_path / "memory", "a", ["a"] * 4, InProcess(4))
    copies.keep(5, path, Checkpoint.open(path).manifest)
    assert copies.kept == 5 and not copies.problems
    found = copies.gather()
    assert found is not None and not Checkpoint.open(found).verify()
    assert Checkpoint.open(found).plan() == "plan"
    text = (found / "manifest.json").read_bytes()
    (found / "manifest.json").write_bytes(text.replace(b'"step":5', b'"step":6'))
    assert copies.gather() is None
    (found / "manifest.json").write_bytes(text)
    assert copies.gather() == found
    (found / "rank-00002.safetensors").unlink()
    assert copies.gather() is None
    copies.remove()
    assert not (tmp_path / "memory").exists()


def begun(root: Path, stop: int, steps: int = 6) -> list[int]:
    """A run in this process that ends by a failure after so many steps; the steps that it did."""
    seen: list[int] = []

    def note(info: StepInfo) -> None:
        seen.append(info.step)
        if info.step == stop:
            raise RuntimeError("the end")

    trainer = make(language((2, 2)), InProcess(2))
    kept = Checkpoints(root / "run", every=2, copies=root / "memory")
    with pytest.raises(FxpartError, match="the end") if stop else contextlib.nullcontext():
        trainer.fit(
            [batch(seed=i) for i in range(9)], steps=steps, checkpoints=kept, callbacks=[note]
        )
    for thread in threading.enumerate():
        if thread.name == "saver":
            thread.join()
    return seen


@pytest.mark.slow
def test_memory_is_used_while_it_is_whole_and_new(tmp_path: Path) -> None:
    assert begun(tmp_path, 5) == [1, 2, 3, 4, 5]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert begun(tmp_path, 5) == [5]  # from memory, and copied to the disk no more
    (place,) = [p for p in (tmp_path / "memory").iterdir() if "0004-" in p.name]
    damaged = place / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    assert begun(tmp_path, 3) == [3]  # the one before is whole
    shutil.rmtree(tmp_path / "memory")
    shutil.rmtree(tmp_path / "run")
    assert begun(tmp_path, 5) == [1, 2, 3, 4, 5]
    (place,) = [p for p in (tmp_path / "memory").iterdir() if "0004-" in p.name]
    damaged = place / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    with pytest.warns(UserWarning, match="rank-00001"):
        assert begun(tmp_path, 5) == [5]  # from the disk
    identity = (tmp_path / "run" / "identity").read_text()
    assert len(identity) == 16
    assert begun(tmp_path, 0) == [5, 6]
    assert not (tmp_path / "memory").exists()
    (tmp_path / "memory").mkdir(mode=0o755)
    with pytest.warns(UserWarning, match="not private"):  # and no harm is done
        begun(tmp_path, 0, steps=7)


def test_memory_is_its_owners_alone(tmp_path: Path) -> None:
    memory = MemoryCheckpointStore(tmp_path / "m")
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    for where, name in (("..", "x"), ("step-0000000001-00000000", "../x"), ("step-1", "x"),
                        ("step-0000000001-00000000", ".hidden")):  # fmt: skip
        with (
            pytest.raises(ValueError, match="not the name of a checkpoint file"),
            memory.create(where, name),
        ):
            pass
    (tmp_path / "link").symlink_to(tmp_path / "m")
    (tmp_path / "open").mkdir(mode=0o755)
    for name in ("link", "open"):
        with pytest.raises(FileExistsError):
            MemoryCheckpointStore(tmp_path / name)
    assert default_root("x").name == f"fxpart-{os.getuid()}-x"


def test_a_folder_that_another_rank_gives_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one machine share its memory: what goes while it is looked at is not held."""
    memory = MemoryCheckpointStore(tmp_path / "m")
    old, new = (f"step-{step:010d}-00000000" for step in (5, 10))
    for where in (old, new):
        for name in ("rank-0", "rank-1"):
            with memory.create(where, name) as file:
                file.write(b"1234")
    assert memory.inventory() == {w: {"rank-0": 4, "rank-1": 4} for w in (old, new)}
    real = files.is_name

    def gone(name: str) -> bool:
        shutil.rmtree(tmp_path / "m" / old, ignore_errors=True)
        return real(name)

    monkeypatch.setattr(files, "is_name", gone)
    assert memory.inventory() == {new: {"rank-0": 4, "rank-1": 4}}


FILES = ("manifest.json", "rank-0", "rank-1")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_chosen(data: st.DataObject) -> None:
    """By trying every checkpoint and file: the newest that is whole, and moves that make it so."""
    names = [f"step-{step:010d}-{tag}" for step in (1, 2) for tag in ("00000000", "11111111")]
    machines = {}
    for host in "abc"[: data.draw(st.integers(1, 3))]:
        held = {
            where: {
                f: data.draw(st.sampled_from([3, 3, 3, 2]))
                for f in data.draw(st.sets(st.sampled_from(FILES)))
            }
            for where in data.draw(st.sets(st.sampled_from(names)))
        }
        needed = {
            w: dict.fromkeys(FILES, 3)
            for w, files in held.items()
            if files.get("manifest.json") == 3
        }
        machines[host] = CheckpointMemoryInventory(
            held, needed, data.draw(st.sampled_from([0, 3, 100]))
        )
    at_least = data.draw(st.integers(-1, 3))

    def possible(where: str) -> bool:
        known = any(where in told.needed for told in machines.values())
        missing = {
            host: [f for f in FILES if told.present.get(where, {}).get(f) != 3]
            for host, told in machines.items()
        }
        there = not set.intersection(*(set(files) for files in missing.values()))
        fits = all(3 * len(files) <= machines[host].free for host, files in missing.items())
        return known and there and fits and int(where[5:15]) >= at_least

    found = select_checkpoint(machines, at_least)
    assert (found is None) == (not any(map(possible, names)))
    if found is not None:
        where, moves = found
        assert possible(where)
        assert int(where[5:15]) == max(int(n[5:15]) for n in names if possible(n))
        for move in moves:
            assert machines[move.source].present[where][move.file] == 3
        have = {(host, f) for host, told in machines.items()
                for f, size in told.present.get(where, {}).items() if size == 3}  # fmt: skip
        have |= {(move.target, move.file) for move in moves}
        assert have >= set(itertools.product(machines, FILES))
