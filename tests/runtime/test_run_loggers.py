"""Figures of steps, and callbacks that log them; with the real packages where installed."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import torchrun
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime import (
    Callback,
    Event,
    MLflowLogger,
    PrometheusFile,
    StepInfo,
    TensorBoardLogger,
    WandbLogger,
)
from fxpart.runtime.run_loggers import get_scalars

LOSSES = [4.0, 3.0, 2.5]
SAMPLE = re.compile(r'fxpart_[a-z_]+\{([a-z]+="[^"]*",?)+\} -?[0-9.e+-]+')


def info(step: int, rank: int = 0, **more: Any) -> StepInfo:
    given = {"lr": (0.1,), "grad_norm": None, "rows": 8, "seconds": 0.5, **more}
    return StepInfo(step, 0, LOSSES[step - 1], rank=rank, **given)


def play(logger: Callback, rank: int = 0, start: int = 0, failed: bool = False) -> None:
    """A run of three steps with an evaluation."""
    logger.on_event(Event("start", start, 0, rank))
    for step in range(start + 1, 4):
        logger.on_step(info(step, rank, busy=(0.25, 0.125), peak_memory=1 << 20, tokens=64))
    logger.on_event(Event("evaluation", 3, 0, rank, {"loss": 1.5, "bad": math.nan}))
    logger.on_event(Event("failure" if failed else "end", 3, 0, rank, why="steps"))


def test_figures_of_a_step() -> None:
    made = info(1, busy=(0.25, 0.125), peak_memory=7, tokens=64, mfu=0.4, grad_norm=2.0)
    assert made.bubble == 1 - 0.375 / (2 * 0.5) and made.tokens_per_second == 128.0
    assert get_scalars(made) == {
        "loss": 4.0, "grad_norm": 2.0, "step_seconds": 0.5, "samples_per_second": 16.0,
        "tokens_per_second": 128.0, "mfu": 0.4, "bubble": 0.625, "epoch": 0.0, "lr": 0.1,
        "busy_seconds/rank0": 0.25, "busy_seconds/rank1": 0.125, "peak_memory_bytes/rank0": 7.0,
    }  # fmt: skip
    bare = get_scalars(info(2, lr=(0.1, 0.2), seconds=0.0))
    assert bare == {"loss": 3.0, "step_seconds": 0.0, "epoch": 0.0, "lr/group0": 0.1,
                    "lr/group1": 0.2}  # fmt: skip


@pytest.mark.slow
def test_fit_passes_figures_of_a_token_model() -> None:
    """Tokens are rows times length; the MFU follows from the program's FLOPs and peaks."""
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids)).mean(1)

    batch = torch.randint(50, (8, 12)), torch.randint(50, (8,))
    program = fxpart.compile(
        Tokens(), "local:2", example_inputs=batch, loss=nn.functional.cross_entropy,
        constraints={"stages": 2, "mesh": "none"}, microbatches=2,
    )  # fmt: skip
    seen: list[StepInfo] = []
    trainer = program.trainer("sgd")
    trainer.fit([batch] * 4, accumulate=2, callbacks=[seen.append])
    assert [each.rows for each in seen] == [16, 16] and [each.tokens for each in seen] == [192, 192]
    assert all(each.peak_memory > 1 << 20 for each in seen)
    work = program.plan.model.work
    assert work is not None
    flops = work.flops * 16  # two batches per update
    peaks = sum(device.flops["float32"] for device in program.plan.cluster.devices)
    for each in seen:
        assert each.mfu == pytest.approx(flops / each.seconds / peaks, rel=1e-9)


RANKS = """
import sys, torch
from torch import nn
import fxpart
from fxpart.runtime import PrometheusFile

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
batch = torch.randn(64, 64), torch.randn(64, 64)
program = fxpart.compile(
    model, "local:2", example_inputs=batch, loss=nn.MSELoss(), microbatches=4,
    constraints={"stages": 2, "mesh": "none"},
)
seen = []
trainer = program.trainer("sgd")
log = PrometheusFile(sys.argv[1] + "/run.{rank}.prom", labels={"run": "first"})
trainer.fit([batch] * 3, callbacks=[seen.append, log])
assert len(seen[-1].busy) == 2 and all(0 < each < seen[-1].seconds for each in seen[-1].busy)
assert 0 <= seen[-1].bubble < 1
"""


@pytest.mark.slow
def test_ranks_write_their_own_files(tmp_path: Path) -> None:
    """Over two processes: computation of both ranks, and the memory of each."""
    (tmp_path / "train.py").write_text(RANKS)
    done = torchrun(tmp_path / "train.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"run.{rank}.prom").read_text() for rank in range(2))
    assert 'fxpart_busy_seconds{run="first",rank="1"}' in first and "fxpart_loss{" in first
    assert 'fxpart_peak_memory_bytes{run="first",rank="1"}' in second
    assert "fxpart_loss{" not in second and not list(tmp_path.glob(".*"))
    for line in first.splitlines():
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line


def test_prometheus_file_is_replaced_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "new/run.prom"
    play(PrometheusFile(path, labels={"run": 'a"b'}))
    text = path.read_text()
    assert 'fxpart_loss{run="a\\"b",rank="0"} 2.5\n' in text
    assert 'fxpart_evaluation_loss{run="a\\"b",rank="0"} 1.5\n' in text and "bad" not in text
    assert "# TYPE fxpart_loss gauge\n" in text and text.endswith("\n")
    assert 'fxpart_step{run="a\\"b",rank="0"} 3.0\n' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "a family of samples must be in one place"
    diverged = PrometheusFile(path)
    play(diverged)
    diverged.on_event(Event("start", 3, 0, 0))
    diverged.on_step(StepInfo(4, 0, math.nan, (0.1,), None, 8, 0.5, 0))
    assert "fxpart_loss{" not in path.read_text(), "an old loss must not stay"
    play(PrometheusFile(tmp_path / "other.prom"), rank=1)
    assert not (tmp_path / "other.prom").exists()


def test_wrong_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(make: Callable[[], object]) -> str:
        with pytest.raises(FxpartError) as refused:
            make()
        return refused.value.code

    assert code(lambda: PrometheusFile("x", labels={"rank": "1"})) == "FXP109"
    assert code(lambda: PrometheusFile("x", every=0)) == "FXP109"
    (tmp_path / "file").write_text("")
    blocked = PrometheusFile(tmp_path / "file" / "x.prom")
    assert code(lambda: blocked.on_event(Event("start", 0, 0, 0))) == "FXP603"
    for module in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    makers: list[Callable[[], object]] = [
        lambda: TensorBoardLogger(tmp_path), WandbLogger, MLflowLogger,
    ]  # fmt: skip
    assert [code(make) for make in makers] == ["FXP601"] * 3


def test_tensorboard_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a resumed run replace those after its checkpoint; other ranks write memory."""
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str, **options: Any) -> None:
            calls.append((log_dir, options))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append((tag, value, step))

        def close(self) -> None:
            calls.append("closed")

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    play(TensorBoardLogger(tmp_path, every=2), start=1)
    assert calls[0] == (str(tmp_path), {"purge_step": 2})
    assert ("train/loss", 3.0, 2) in calls and ("evaluation/loss", 1.5, 3) in calls
    assert {call[2] for call in calls if call[0] == "train/loss"} == {2} and calls[-1] == "closed"
    calls.clear()
    play(TensorBoardLogger(tmp_path, per_rank=True), rank=1)
    assert calls[0] == (str(tmp_path / "rank1"), {})
    assert {call[0] for call in calls[1:-1]} == {"train/peak_memory_bytes/rank1"}
    calls.clear()
    play(TensorBoardLogger(tmp_path), rank=1)
    assert calls == []


def test_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(TensorBoardLogger(tmp_path))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [each.value for each in found.Scalars("train/loss")] == LOSSES
    assert [each.value for each in found.Scalars("train/bubble")] == [0.625] * 3


def test_real_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    play(WandbLogger(mode="offline", project="test", dir=str(tmp_path)))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # its service writes the file after the run has finished
    while b"evaluation/loss" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"train/loss" in file.read_bytes() and b"evaluation/loss" in file.read_bytes()


def test_real_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLflowLogger("test", uri=uri, run_name="first")
    play(logger, failed=True)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == list(enumerate(LOSSES, 1))
    assert run.info.status == "FAILED"


def test_wandb_and_mlflow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the packages: what is passed, against the signatures of their documentation."""
    logged: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: None,
        log=lambda values: logged.append(values),
        finish=lambda exit_code: logged.append(exit_code),
    )
    fake = ModuleType("wandb")
    fake.init = lambda **options: logged.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    play(WandbLogger(mode="offline"), failed=True)
    assert logged[0] == {"mode": "offline"} and logged[-1] == 1
    assert [row["train/loss"] for row in logged[1:4]] == LOSSES and logged[2]["step"] == 2
    assert logged[4] == {"evaluation/loss": 1.5, "step": 3}


@pytest.mark.slow
def test_loggers_have_a_name_for_each_area(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxpart")
    batch = torch.randn(8, 4), torch.randn(8, 2)
    program = fxpart.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "local:2", example_inputs=batch,
        loss=nn.MSELoss(), constraints={"stages": 2},
    )  # fmt: skip
    program.trainer("sgd").fit([batch])
    names = {record.name for record in caplog.records}
    assert {"fxpart.capture", "fxpart.planner", "fxpart.runtime"} <= names
    assert all(name.startswith("fxpart.") for name in names if name.startswith("fxpart"))
