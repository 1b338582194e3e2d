"""A run by the command line: a rank killed, one rank fewer, and two again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import elastic_programs as programs
import pytest
import ranks
import torch

import fxpart
from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.run_lock import read_launcher_record
from fxpart.elastic.progress import is_finished, read_checkpoint_step, read_ledger_step
from fxpart.elastic.scale_request import request_rank_count
from fxpart.plan.model import Plan
from fxpart.runtime.training_run import ledger

TARGET = Path(__file__).resolve().parents[1] / "benchmarks" / "elastic_target.py"
SLOW_TARGET = Path(__file__).resolve().parents[1] / "support" / "slow_target.py"
LIMIT = 200.0  # seconds on a machine that does much else


class Launched:
    """``fxpart train`` as a process, and what its folder says. before: words of a launcher."""

    def __init__(
        self, folder: Path, *options: str, before: Sequence[str] = (), target: Path = TARGET
    ) -> None:
        self.run = RunDir(folder)
        command = [
            sys.executable, "-m", *before, "fxpart", "train", f"{target}:net", "--run-dir",
            str(folder), "-m", "4", "--cost-model", "roofline", *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=ranks._environment(), preexec_fn=ranks.die_with_parent, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for it."""
        end = time.monotonic() + LIMIT
        while not done():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said(kill=True)
            time.sleep(0.02)

    def said(self, *, kill: bool = False) -> str:
        """What it wrote, once it has ended."""
        if kill:
            self.process.kill()
        return self.process.communicate(timeout=LIMIT)[1]

    def worlds(self) -> list[int]:
        """Ranks of the generations that have begun."""
        if not self.run.generations.exists():
            return []
        lines = [json.loads(x) for x in self.run.generations.read_text().splitlines()]
        return [line["world"] for line in lines if line["line"] == "began"]

    def goes_on(self, worlds: list[int]) -> None:
        """Until the generations are these, and three steps more are done."""
        self.until(lambda: self.worlds() == worlds)
        before = read_ledger_step(self.run)
        self.until(lambda: read_ledger_step(self.run) >= before + 3)

    def children(self) -> list[int]:
        """The launcher's ranks."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"train" in words:
                    found.append(int(pid))
        return sorted(found)


@contextmanager
def launched(folder: Path, *options: str, **more: Any) -> Iterator[Launched]:
    """The run, ended in any case."""
    run = Launched(folder, *options, **more)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def losses_of_one(steps: int) -> Any:
    """Plain torch on the target's data."""
    return pytest.approx(programs.one_process(steps, epoch=programs.EPOCH), rel=1e-5)


@pytest.mark.slow
def test_killed_scaled_and_scaled_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launched(folder, "--nproc", "1:2", "--every", "5", "--steps", "100000") as run:
        run.goes_on([2])
        run.until(lambda: read_checkpoint_step(run.run) >= 5)
        os.kill(run.children()[1], signal.SIGKILL)
        run.goes_on([2, 2])
        request_rank_count(run.run, 1)
        run.goes_on([2, 2, 1])
        request_rank_count(run.run, 2)
        run.goes_on([2, 2, 1, 2])
        run.process.send_signal(signal.SIGTERM)
        said = run.said()
        assert run.process.returncode == 0, said
    assert "ended with signal 9" in said and "2 -> 1 ranks" in said and "1 -> 2 ranks" in said
    assert read_launcher_record(run.run) is None and not is_finished(run.run)
    summary = ledger.check_ledger(run.run.ledger)
    assert not summary.problems and summary.generations == 4
    losses = [update.number for update in ledger.read_updates(run.run.ledger)]
    assert losses == losses_of_one(len(losses))
    bits = [json.loads(x) for x in (folder / "bits.jsonl").read_text().splitlines()]
    assert [(row["from"], row["to"]) for row in bits] == [(2, 2), (2, 1), (1, 2)]
    assert all(row["wrong"] == [] and row["tensors"] > 60 for row in bits)


def emulated(run: RunDir, root: Path) -> tuple[list[float], Path]:
    """The losses and the last checkpoint of the same plans one after the other, in one process."""
    plans = {Plan.load(path).world: path for path in run.plans.glob("*-*.json")}
    begun = ledger.read_ledger_generations(run.ledger)
    losses: list[float] = []
    stops = [line.after for line in begun[1:]] + [len(ledger.read_updates(run.ledger))]
    for line, stop in zip(begun, stops, strict=True):
        trainer = fxpart.compile(
            programs.model(), example_inputs=programs.batch(0), plan=plans[line.world],
            loss=torch.nn.functional.cross_entropy,
        ).trainer(programs.adamw)  # fmt: skip
        if line.after:
            trainer.load_checkpoint(root)
        told = [trainer.step(programs.batch(s % programs.EPOCH)) for s in range(line.after, stop)]
        told += trainer.drain()
        losses += [float(loss) for loss in told if loss is not None]
        last = trainer.save_checkpoint(root)
        trainer.close()
    return losses, last


@pytest.mark.slow
def test_an_asynchronous_run_scaled(tmp_path: Path) -> None:
    """Each change drains the pipeline; then it is the stream of the next plan, from those weights.

    What one process has that runs the same plans over the same batches, to the bit.
    """
    folder = tmp_path / "run"
    options = ("--nproc", "2:3", "--mode", "async", "--fix", "tp=1", "--fix", "dp=1")
    with launched(folder, *options, "--every", "100000", "--steps", "100000") as run:
        run.goes_on([3])
        request_rank_count(run.run, 2)
        run.goes_on([3, 2])
        request_rank_count(run.run, 3)
        run.goes_on([3, 2, 3])
        run.process.send_signal(signal.SIGTERM)
        said = run.said()
        assert run.process.returncode == 0, said
    assert not ledger.check_ledger(run.run.ledger).problems
    bits = [json.loads(x) for x in (folder / "bits.jsonl").read_text().splitlines()]
    assert [(row["from"], row["to"]) for row in bits] == [(3, 2), (2, 3)]
    # All but what a checkpoint says of the stages themselves, which are others.
    of_stages = ("stage/", "trainer/stages")
    assert not [key for row in bits for key in row["wrong"] if not key.startswith(of_stages)]
    assert all(row["tensors"] > 60 for row in bits)
    assert Plan.load(run.run.plan).schedule == "async"
    losses, last = emulated(run.run, tmp_path / "emulated")
    assert [update.number for update in ledger.read_updates(run.run.ledger)] == losses
    newest = run.run.checkpoints / f"step-{read_checkpoint_step(run.run):010d}"
    assert programs.differences(newest, last) == []


@pytest.mark.slow
def test_a_number_without_a_plan_disturbs_nobody(tmp_path: Path) -> None:
    """Of a model in two stages at least, one rank; the ranks that train hear nothing of it."""
    options = ("--nproc", "1:2", "--fix", "stages=2", "--steps", "100000")
    with launched(tmp_path / "run", *options) as run:
        run.goes_on([2])
        children = run.children()
        request_rank_count(run.run, 1)
        before = read_ledger_step(run.run)
        run.until(lambda: read_ledger_step(run.run) >= before + 60)
        assert run.children() == children and run.worlds() == [2]
        run.process.send_signal(signal.SIGTERM)
        said = run.said()
        assert run.process.returncode == 0, said
    assert said.count("no plan for 1 ranks") == 1 and "continuing with 2" in said
    # Who ends the job says how to go on, and nobody else does.
    assert said.count("run the same command to resume") == 1


@pytest.mark.slow
def test_a_machine_that_goes(tmp_path: Path) -> None:
    """Two agents of torchrun as two machines, the second killed with its rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    torchrun = [
        "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
        "--rdzv-conf=last_call_timeout=5", "-m",
    ]  # fmt: skip
    options = ("--every", "5", "--steps", "100000")
    folder = tmp_path / "run"
    with launched(folder, *options, before=torchrun) as first:
        time.sleep(1.0)  # the first is the one that keeps the store
        with launched(folder, *options, before=torchrun) as second:
            first.goes_on([2])
            # The plan for one machine less is there before it is needed.
            first.until(lambda: len(list(first.run.plans.glob("*-1.json"))) == 1)
            first.until(lambda: read_checkpoint_step(first.run) >= 5)
            for pid in (*second.children(), second.process.pid):
                os.kill(pid, signal.SIGKILL)
            first.goes_on([2, 1])
        first.process.send_signal(signal.SIGTERM)
        first.said()
    losses = [update.number for update in ledger.read_updates(first.run.ledger)]
    assert losses == losses_of_one(len(losses))
    assert not ledger.check_ledger(first.run.ledger).problems
    bits = [json.loads(x) for x in (folder / "bits.jsonl").read_text().splitlines()]
    assert [(row["from"], row["to"], row["wrong"]) for row in bits] == [(2, 1, [])]


@contextmanager
def slowed(pid: int, period: float = 0.006, share: float = 0.75) -> Iterator[None]:
    """A process that is stopped for so much of its time."""
    over = threading.Event()

    def stop_and_go() -> None:
        with suppress(ProcessLookupError):
            while not over.wait(period * (1 - share)):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(period * share)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_rank_that_has_become_slow_gets_less(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--nproc", "2", "--fix", "stages=2", "--rebalance", "--steps", "100000")
    with launched(folder, *options, target=SLOW_TARGET) as run:
        run.goes_on([2])
        run.until(lambda: read_ledger_step(run.run) >= 40)
        before = Plan.load(run.run.plan)
        with slowed(run.children()[1]):
            run.until(lambda: len(run.worlds()) == 2)
        run.goes_on([2, 2])
        run.process.send_signal(signal.SIGTERM)
        said = run.said()
        assert run.process.returncode == 0, said
    after = Plan.load(run.run.plan)
    assert "rank 1 is" in said and "times slower" in said and "saving first" in said
    blocks = [
        sum(stage.last - stage.first + 1 for stage in plan.stages if stage.ranks == (1,))
        for plan in (before, after)
    ]
    assert blocks[1] < blocks[0], blocks
    assert not ledger.check_ledger(run.run.ledger).problems
