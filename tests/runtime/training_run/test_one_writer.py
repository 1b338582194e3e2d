"""One process writes into the folder of a run, whatever starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import ROOT, heard, read_until, run_commands, same, start_command, train

from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.run_lock import LauncherRecord, check_unlocked, lock_folder
from fxpart.errors import FxpartError
from fxpart.runtime.training_run.generations import (
    GenerationFence,
    GenerationStart,
    GenerationWriter,
    load_generations,
)
from fxpart.runtime.training_run.ledger import (
    LedgerGeneration,
    LedgerRollback,
    LedgerUpdate,
    check_ledger,
    read_updates,
)
from fxpart.runtime.training_run.options import Checkpoints
from fxpart.runtime.training_run.run_journal import RunJournal

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{support!r}]
from run_folders import train
from fxpart.errors import FxpartError

def after(step):
    print("step", step, flush=True)
    if step == 4:
        sys.stdin.readline()

try:
    train(Path(sys.argv[1]), 8, after_step=after)
except FxpartError as failure:
    print(failure.code, flush=True)
"""


def start_script(folder: Path) -> subprocess.Popen[str]:
    """A user's script, which waits for a line after step 4."""
    code = SCRIPT.format(support=str(ROOT / "tests" / "support"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for each in process.stdout:
        if each.strip() == line:
            return
    raise AssertionError(f"{line!r} was not printed")


@pytest.mark.slow
def test_a_second_run_in_the_same_process(tmp_path: Path) -> None:
    refused: list[str] = []

    def start_another(step: int) -> None:
        if step == 3:
            with pytest.raises(FxpartError) as caught:
                train(tmp_path, 9)
            refused.append(caught.value.code)

    found, state = train(tmp_path, 6, after_step=start_another)
    assert refused == ["FXP521"] and found.saved
    assert len(load_generations(tmp_path / "generations.jsonl")) == 1
    assert check_ledger(tmp_path / "steps.jsonl").problems == ()
    assert same(state, train(tmp_path.with_name("alone"), 6)[1])
    assert train(tmp_path, 7)[0].steps == 7, "released at the end"


def test_who_has_the_lock_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    check_unlocked(run)
    assert not run.path.exists()
    lock = lock_folder(run)
    lock.publish(1, 1, 1, "trainer")
    with pytest.raises(FxpartError, match=f"another trainer, process {os.getpid()}"):
        check_unlocked(run)
    lock.close()
    check_unlocked(run)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "link", tmp_path / "file" / "run"):
        with pytest.raises(FxpartError, match="FXP603[\\s\\S]*it is a file or a broken link"):
            lock_folder(RunDir(path))


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = lock_folder(RunDir(tmp_path))
    child = os.fork()
    if not child:
        time.sleep(20)
        os._exit(0)
    try:
        lock.close()
        lock_folder(RunDir(tmp_path), patience=10.0).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_only_the_launchers_own_ranks_train_beside_it(tmp_path: Path) -> None:
    """A child of the process that has the lock is its rank; this process is no child of itself."""
    lock = lock_folder(RunDir(tmp_path))
    lock.publish(1, 2, 2, "launcher")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from fxpart.checkpoint.run_directory import RunDir\n"
        "from fxpart.checkpoint.run_lock import lock_folder\n"
        "lock_folder(RunDir(Path(sys.argv[1]))).close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, timeout=60, check=False, cwd=ROOT).returncode == 0
    with pytest.raises(FxpartError, match="FXP521"):
        lock_folder(RunDir(tmp_path))
    lock.publish(1, 2, 2, "trainer")
    done = subprocess.run(command, timeout=60, check=False, cwd=ROOT, capture_output=True)
    assert b"FXP521" in done.stderr
    lock.close()


def test_a_lock_in_a_folder_that_was_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    lock = lock_folder(run)
    run.path.rename(tmp_path / "moved")
    lock.renew()
    with pytest.raises(FxpartError, match="FXP521"):
        lock_folder(run)
    (run.path / "supervisor.json").unlink()
    other = lock_folder(run)
    with pytest.raises(FxpartError, match="FXP521"):
        lock.renew()
    other.close()
    lock.close()


def test_generations_of_other_jobs_refuse_writes(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    book = GenerationWriter(path)
    start = {"world": 1, "step": 0, "reached": 0, "plan": ""}
    book.begin(3, **start, writer="a")
    mine, other = GenerationFence(path, 3, "a"), GenerationFence(path, 3, "b")
    mine.check()
    with pytest.raises(FxpartError, match="FXP521"):
        other.check()
    book.end(3, step=1, how="steps")
    mine.check()
    book.begin(4, **start, writer="c")
    with pytest.raises(FxpartError, match="generation 4"):
        mine.check()
    path.unlink()
    mine.check()  # no other job is known
    book.close()
    assert GenerationStart(generation=1, began=0.0, world=1, step=0, reached=0).writer == ""


@pytest.mark.slow
def test_a_process_that_wakes_up_late_writes_nothing(tmp_path: Path) -> None:
    """Its lock was lost while it was stopped, as on a file system of another host."""
    run = RunDir(tmp_path / "run")
    late = start_script(run.path)
    try:
        wait_for(late, "step 4")
        os.kill(late.pid, signal.SIGSTOP)
        with pytest.raises(FxpartError, match="which is stopped"):
            train(run.path, 8)
        run.lock.unlink()
        found, state = train(run.path, 8)
        before = {
            path: path.read_bytes()
            for path in run.path.rglob("*")
            if path.is_file() and path.suffix != ".ring"
        }
        os.kill(late.pid, signal.SIGCONT)
        out, _ = late.communicate("\n", timeout=60)
    finally:
        late.kill()
        late.wait()
    assert "FXP521" in out and "step 6" not in out
    after = {
        path: path.read_bytes()
        for path in run.path.rglob("*")
        if path.is_file() and path.suffix != ".ring"
    }
    assert after == before and found.saved
    assert same(state, train(tmp_path / "alone", 8)[1])
    assert len(read_updates(run.ledger)) == 8


@pytest.mark.slow
def test_commands_started_together(tmp_path: Path) -> None:
    """Four at once, with a launcher and without: one trains, and each other is refused."""
    run = RunDir(tmp_path / "run")
    kinds = [["-c", "local:1"], ["--nproc", "1"]] * 2
    commands = [
        start_command(tmp_path / "nets.py", run.path, 30, *kind, slow=0.3) for kind in kinds
    ]
    outputs = run_commands(commands)
    codes = [command.returncode for command in commands]
    assert codes.count(0) == 1, outputs
    for code, output in zip(codes, outputs, strict=True):
        assert code == 0 or (code == 2 and "FXP521" in output), output
    assert check_ledger(run.ledger).problems == () and len(read_updates(run.ledger)) == 30


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_launcher_has_the_lock_between_two_starts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    first = start_command(tmp_path / "nets.py", run.path, 400, "--nproc", "1", slow=0.05)
    try:
        read_until(first, 3)
        record = LauncherRecord(first.pid, 1, 1, 1)
        with pytest.raises(FxpartError, match=f"another launcher, process {record.pid}"):
            check_unlocked(run)
        with heard() as texts, pytest.raises(FxpartError, match="FXP521"):
            train(run.path, 3)
        assert texts == []
    finally:
        first.kill()
        first.communicate()


def test_a_journal_of_an_older_job_writes_nothing(tmp_path: Path) -> None:
    """No line of any kind: an update, a rollback, a mark at a save, or the end."""
    journal = RunJournal(Checkpoints(tmp_path))
    start = journal.begin_generation(-1, world=1, plan="")
    journal.begin_ledger(LedgerGeneration(generation=1, after=0, world=1, same=""), "")
    line = {"epoch": 0, "batches": 1, "rows": 2, "loss": 1.0, "digest": ""}
    journal.update(LedgerUpdate(step=1, first=0, **line))
    other = GenerationWriter(RunDir(tmp_path).generations)
    other.begin(2, world=1, step=0, reached=1, plan="", writer="other")
    other.close()
    files = [RunDir(tmp_path).ledger, RunDir(tmp_path).generations]
    before = [path.read_bytes() for path in files]
    for write in (
        lambda: journal.update(LedgerUpdate(step=2, first=1, **line)),
        lambda: journal.roll_back(LedgerRollback(step=2, after=0)),
        lambda: journal.sync(1),
        lambda: journal.end(start.generation, step=1, how="steps"),
    ):
        with pytest.raises(FxpartError, match="FXP521"):
            write()
    journal.close()
    assert [path.read_bytes() for path in files] == before
