"""Copies in processes of their own that take microbatches from queues, and one that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from queued_batches import ROWS, adagrad, batch
from queued_programs import alone, model, plan, program
from ranks import SUPPORT, TESTS, Pool, die_with_parent, python_path
from safetensors.torch import save_file

from fxpart.cli import run
from fxpart.diagnostics.postmortem import examine
from fxpart.plan.model import Plan

pytestmark = pytest.mark.slow


def _trained(text: str, staleness: int) -> tuple[list[float], dict[str, Any], float, list[int]]:
    made = program(Plan.loads(text)).trainer(adagrad, routing="queue", staleness=staleness)
    losses = []
    for step, rows in enumerate(ROWS):
        loss = made.step(batch(rows, step))
        losses += [] if loss is None else [float(loss)]
    losses += [float(loss) for loss in made.drain()]
    state = {name: value.tolist() for name, value in made.state_dict().items()}
    evaluated = float(made.eval_step(batch(10, 9)))
    stale = [each.staleness for each in made.report()]
    made.close()
    return losses, state, evaluated, stale


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_the_numbers_of_one_process(pool: Pool, counts: tuple[int, ...]) -> None:
    wanted, state = alone()
    for losses, found, _, stale in pool.run(_trained, plan(counts).dumps(), 0, ranks=3):
        assert losses == pytest.approx(wanted, rel=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-5, atol=1e-6)
        assert stale == [0, 0, 0]


def test_staleness_keeps_to_its_bound(pool: Pool) -> None:
    found = pool.run(_trained, plan((2, 1)).dumps(), 2, ranks=3)
    assert all(each == found[0] for each in found[1:])
    losses, _, _, stale = found[0]
    assert len(losses) == len(ROWS) and max(stale) <= 2


def _in_runs(text: str, folder: str) -> tuple[list[str], int, float, dict[str, Any]]:
    """Two generations of a run; in the first the last rank is asked to end."""
    whys = []
    for generation in range(2):
        made = program(Plan.loads(text)).trainer(adagrad, routing="queue")

        def asks(info: Any, made: Any = made, generation: int = generation) -> None:
            if (generation, info.step, made.rank) == (0, 2, 2):
                made.request.mine = signal.SIGTERM

        data = [batch(rows, step) for step, rows in enumerate(ROWS)]
        found = made.fit(data, checkpoints=folder, callbacks=[asks])
        whys.append(found.why)
        state = {name: value.tolist() for name, value in made.state_dict().items()}
        made.close()
    return whys, found.steps, found.loss, state


def test_a_run_ends_on_every_rank_when_one_is_asked(pool: Pool, tmp_path: Path) -> None:
    """At the same step, with a checkpoint from which the same script goes on."""
    losses, weights = alone()
    for whys, steps, loss, state in pool.run(
        _in_runs, plan((2, 1)).dumps(), str(tmp_path), ranks=3
    ):
        assert whys == ["SIGTERM to rank 2", "data"] and steps == len(ROWS)
        assert loss == pytest.approx(losses[-1], rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-5, atol=1e-6)


def environment(dies: str) -> dict[str, str]:
    """Of ranks that are started. dies: which of them, and when."""
    path = python_path(TESTS.parent, SUPPORT)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FXPART_TEST_DIES": dies}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies that feed two, with their first weights."""
    folder = tmp_path_factory.mktemp("exported")
    program(plan((2, 2))).export(folder)
    save_file(model().state_dict(), folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize(
    ("dies", "stage"),
    # The second of those that feed, the first of those fed, and one that says nothing any more.
    [("1:2:1:SIGKILL", 1), ("2:3:2:SIGKILL", 2), ("3:1:1:SIGSTOP", 3)],
)
def test_a_killed_copy_is_missed_by_nobody(
    exported: Path, tmp_path: Path, dies: str, stage: int
) -> None:
    """In the midst of a step: the numbers stay those of one process."""
    answer = tmp_path / "answer.json"
    code = (
        "import sys; from fxpart.launch import start_each\n"
        "def tell(failed): print(failed.rank, failed.how)\n"
        "sys.exit(start_each(sys.argv[1:], 4, module='queued_killed', tell=tell).code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(exported), str(answer)], env=environment(dies),
        capture_output=True, text=True, timeout=200, check=False, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{stage} signal 9\n"
    found, (losses, state) = json.loads(answer.read_text()), alone()
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    for name, value in state.items():
        got = torch.tensor(found["state"][name])
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
    assert found["lost"] == [stage]
    assert found["copies"] == [[copy, len(ROWS)] for copy in range(4) if copy != stage]
    other = program(plan((1, 2))).trainer(adagrad, routing="queue")  # from what the living saved
    other.load_checkpoint(tmp_path / "saved")
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, torch.tensor(found["state"][name]), rtol=0, atol=0)
    assert other.updates == len(ROWS)
    other.close()


def command_line(path: Path, *more: str) -> list[str]:
    plan((2, 1)).dump(path / "plan.json")
    return [
        sys.executable, "-m", "fxpart", "train", f"{SUPPORT / 'queued_target.py'}:clicks",
        "--plan", str(path / "plan.json"), "--nproc", "3", "--routing", "queue", "--json", *more,
    ]  # fmt: skip


def test_the_command_line_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    """Killed while it reads the third batch, or soon after; queues as the plan says."""
    command = command_line(tmp_path, "--steps", str(len(ROWS)))
    place = command.index("--routing")
    del command[place : place + 2]
    said = msgspec.structs.replace(plan((2, 1)), staleness=(1, 1, 0), weights="stash")
    said.dump(tmp_path / "plan.json")
    done = subprocess.run(
        command, env=environment("1:2:0"), capture_output=True, text=True, timeout=280,
        check=False, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ended with signal 9; the others continue" in done.stderr
    *steps, last = (json.loads(line) for line in done.stdout.splitlines())
    assert [row["step"] for row in steps] == list(range(1, len(ROWS) + 1))
    assert last["lost"] == [1] and [copy["stage"] for copy in last["copies"]] == [0, 2]
    first, other = (copy["staleness"] for copy in last["copies"])
    assert first <= 1 and other == 0


def test_a_run_of_the_command_line_goes_on(tmp_path: Path) -> None:
    """Without a rank that is killed, and with all ranks when the same command is given again."""
    found: list[dict[str, Any]] = []
    for steps, dies in ((4, "1:2:0"), (len(ROWS), "-1:0:0")):
        given = ("--run", str(tmp_path / "run"), "--every", "2", "--steps", str(steps))
        done = subprocess.run(
            command_line(tmp_path, *given), env=environment(dies), capture_output=True, text=True,
            timeout=280, check=False, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found += [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["step"] for row in found if "step" in row] == list(range(1, len(ROWS) + 1))
    losses = [row["loss"] for row in found if "step" in row]
    assert losses == pytest.approx(alone()[0], rel=1e-6)
    assert [row["from"] for row in found if "from" in row] == [4]
    assert [row["lost"] for row in found if "lost" in row] == [[1], []]
    killed, whole = (examine(tmp_path / "run", generation) for generation in (1, 2))
    assert killed.first == (1,) and whole.first == ()
    done = [{event.what for event in killed.ranks[rank].newest(1000)} for rank in range(3)]
    assert all("the step" in each for each in done)
    for rank in (0, 2):  # the killed one may have had no microbatch: the other copy was faster
        assert any(re.fullmatch(rf"{rank}[FB]\d", what) for what in done[rank])


@pytest.mark.parametrize("given", [("--copies",), ("--rebalance",), ("--nproc", "2:3")])
def test_what_a_run_from_queues_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    _, _, _, *arguments = command_line(tmp_path, "--run", str(tmp_path / "run"), *given)
    assert run(arguments) == 2
    assert "a run with queue routing cannot change its plan or ranks" in capsys.readouterr().out
