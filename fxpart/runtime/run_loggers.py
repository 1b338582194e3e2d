"""Callbacks that log a run to TensorBoard, Weights & Biases, MLflow, and a Prometheus text file.

All log the same figures under the same names (:func:`get_scalars`). Each needs its package only
when it is created.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpart.errors import error
from fxpart.runtime.callbacks import Callback, Event, StepInfo

# Name: (description, attribute of StepInfo). None is not logged.
_FIGURES = {
    "loss": ("Mean loss over the rows of the update.", "loss"),
    "grad_norm": ("Global gradient norm before clipping.", "grad_norm"),
    "step_seconds": ("Seconds of the step, with data loading.", "seconds"),
    "samples_per_second": ("Rows of the global batch per second.", "rows_per_second"),
    "tokens_per_second": ("Tokens of the global batch per second.", "tokens_per_second"),
    "mfu": ("Model FLOPs utilization, 0 to 1.", "mfu"),
    "bubble": ("Fraction of the step in which ranks do not compute.", "bubble"),
    "epoch": ("Completed passes over the data.", "epoch"),
}
_OF_RANK = {
    "peak_memory_bytes": "Peak memory of the process so far.",
    "busy_seconds": "Seconds of computation in the step.",
}


def get_scalars(info: StepInfo) -> dict[str, float]:
    """Return the finite and known figures of a step by name.

    Figures of ranks are ``busy_seconds/rank0``, for all ranks where known, and
    ``peak_memory_bytes/rank0``, for this process. Learning rates are ``lr``, or ``lr/group0`` where
    there are several groups.
    """
    found = {name: getattr(info, attribute) for name, (_, attribute) in _FIGURES.items()}
    rates = {f"lr/group{i}" if len(info.lr) > 1 else "lr": lr for i, lr in enumerate(info.lr)}
    busy = {f"busy_seconds/rank{rank}": value for rank, value in enumerate(info.busy)}
    memory = {f"peak_memory_bytes/rank{info.rank}": info.peak_memory or None}
    return {
        name: float(value)
        for name, value in {**found, **rates, **busy, **memory}.items()
        if value is not None and math.isfinite(value)
    }


class ScalarLogger(Callback, ABC):
    """Base of callbacks that write named numbers per step; by default on rank 0.

    every: steps from one entry to the next. per_rank: whether every rank writes; ranks other than 0
    write their memory only.
    """

    def __init__(self, *, every: int = 1, per_rank: bool = False) -> None:
        if every < 1:
            raise error(
                "FXP109", where=f"{type(self).__name__}(every={every})",
                why="every must be at least 1", fix="pass a number of steps",
            )  # fmt: skip
        self._every, self._per_rank = every, per_rank
        self._is_open = False

    def on_step(self, info: StepInfo) -> None:
        """Write the figures of the step."""
        if not self._is_open or info.step % self._every:
            return
        figures = get_scalars(info)
        if info.rank:
            figures = {k: v for k, v in figures.items() if k.startswith("peak_memory")}
        self.write("train", figures, info.step)

    def on_event(self, event: Event) -> None:
        """Open the log at the start, close it at the end or a failure; write values between."""
        if event.kind == "start" and (event.rank == 0 or self._per_rank):
            self.begin(event.rank, event.step)
            self._is_open = True
        if not self._is_open:
            return
        if event.kind in ("evaluation", "statistics") and event.rank == 0:
            finite = {k: v for k, v in event.values.items() if math.isfinite(v)}
            self.write(event.kind, finite, event.step)
        if event.kind in ("end", "failure"):
            self._is_open = False
            self.finish(failed=event.kind == "failure")

    @abstractmethod
    def begin(self, rank: int, step: int) -> None:
        """Open the log. step: updates before the run, more than 0 where it resumes."""

    @abstractmethod
    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name. group: "train", "evaluation" or "statistics"."""

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """Complete the log."""


class TensorBoardLogger(ScalarLogger):
    """Writes scalars for TensorBoard into a folder: ``train/loss``, ``evaluation/loss``.

    With ``per_rank``, the other ranks write into subfolders ``rank1``, ``rank2``, ... A resumed run
    replaces the entries after its checkpoint.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, per_rank: bool = False) -> None:
        """Raise FXP601 if tensorboard is not installed."""
        super().__init__(every=every, per_rank=per_rank)
        self._folder = Path(folder)
        self._module = _import("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def begin(self, rank: int, step: int) -> None:
        """Create the writer."""
        folder = str(self._folder / f"rank{rank}" if rank else self._folder)
        resumed = {"purge_step": step + 1} if step else {}
        self._writer = self._module.SummaryWriter(folder, **resumed)

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add the scalars."""
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def finish(self, failed: bool) -> None:
        """Flush and close the files."""
        self._writer.close()


class WandbLogger(ScalarLogger):
    """Logs to Weights & Biases on rank 0.

    options: of ``wandb.init``, such as ``project=``, ``mode="offline"``, and ``id=`` with
    ``resume="allow"`` for a run that resumes.
    """

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        """Raise FXP601 if wandb is not installed."""
        super().__init__(every=every)
        self._module, self._options = _import("wandb", "wandb"), options
        self._run: Any = None

    def begin(self, rank: int, step: int) -> None:
        """Start the run, with the step as the axis of all figures."""
        self._run = self._module.init(**self._options)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Log the figures."""
        self._run.log({**{f"{group}/{k}": v for k, v in values.items()}, "step": step})

    def finish(self, failed: bool) -> None:
        """Finish the run; a failed run is marked."""
        self._run.finish(exit_code=int(failed))


class MLflowLogger(ScalarLogger):
    """Logs to MLflow on rank 0.

    uri: of the tracking server or a database, such as ``sqlite:///mlflow.db``; by default that of
    the environment. run_id: of a run to resume.
    """

    def __init__(
        self,
        experiment: str = "fxpart",
        *,
        uri: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        every: int = 1,
    ) -> None:
        """Raise FXP601 if mlflow is not installed."""
        super().__init__(every=every)
        self._module = _import("mlflow", "mlflow")
        self._experiment, self._uri = experiment, uri
        self._run_id, self._run_name = run_id, run_name
        self._client: Any = None

    def begin(self, rank: int, step: int) -> None:
        """Create the run, or resume it; the client is not the process's active run."""
        self._client = self._module.tracking.MlflowClient(tracking_uri=self._uri)
        if self._run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            number = (
                self._client.create_experiment(self._experiment)
                if found is None
                else found.experiment_id
            )
            run = self._client.create_run(number, run_name=self._run_name)
            self._run_id = run.info.run_id

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Log the figures in one request."""
        now = int(time.time() * 1000)
        metric = self._module.entities.Metric
        metrics = [metric(f"{group}/{k}", v, now, step) for k, v in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, failed: bool) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class PrometheusFile(ScalarLogger):
    """Writes the newest figures as a text file for Prometheus' node exporter.

    path: in the folder of its textfile collector, with the suffix ``.prom``. With ``{rank}`` in it
    every rank writes a file of its own, else rank 0. The file is replaced atomically, and stays
    after the run. labels: added to every sample, such as ``{"run": "first"}``.
    """

    def __init__(
        self, path: str | Path, *, labels: Mapping[str, str] | None = None, every: int = 1
    ) -> None:
        """Raise FXP109 for a label that Prometheus does not allow."""
        self._path = str(path)
        super().__init__(every=every, per_rank="{rank}" in self._path)
        self._labels, self._rank = dict(labels or {}), 0
        self._samples: dict[str, dict[str, float]] = {}  # by group, those of its last entry
        for name in self._labels:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name == "rank":
                raise error(
                    "FXP109", where=f"PrometheusFile(labels={{{name!r}: ...}})",
                    why="a label has letters, digits and underscores, and is not rank",
                    fix="rename the label",
                )  # fmt: skip

    def begin(self, rank: int, step: int) -> None:
        """Check that the file can be written."""
        self._rank, self._samples = rank, {}
        self._replace(step)

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Replace the file."""
        prefix = f"{group}_" if group == "evaluation" else ""
        self._samples[group] = {f"{prefix}{name}": value for name, value in values.items()}
        self._replace(step)

    def finish(self, failed: bool) -> None:
        """Leave the file as it is."""

    def _replace(self, step: int) -> None:
        """Write a temporary file beside the file and rename it; FXP603 if that fails."""
        target = Path(self._path.replace("{rank}", str(self._rank)))
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self._format(step), encoding="utf-8")
            beside.replace(target)
        except OSError as why:
            raise error(
                "FXP603", where=str(target), why=why.strerror or str(why),
                fix="choose a folder that can be written",
            ) from why  # fmt: skip

    def _format(self, step: int) -> str:
        """Return the file: a gauge for each figure, with the rank as a label."""
        families: dict[str, list[str]] = {}
        samples = {name: v for group in self._samples.values() for name, v in group.items()}
        samples |= {"step": float(step), "updated_timestamp_seconds": time.time()}
        for name, value in samples.items():
            family, _, detail = name.partition("/")
            labels = {**self._labels, "rank": str(self._rank)}
            if family in _OF_RANK:
                labels["rank"] = detail.removeprefix("rank")
            elif detail:
                labels["group" if family == "lr" else "name"] = detail
            text = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
            metric = "fxpart_" + re.sub(r"[^a-zA-Z0-9_]", "_", family)
            families.setdefault(metric, []).append(f"{metric}{{{text}}} {value!r}")
        lines = []
        for metric, rows in families.items():
            help_text = _describe(metric.removeprefix("fxpart_"))
            lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge", *rows]
        return "\n".join(lines) + "\n"


def _describe(name: str) -> str:
    if name in _OF_RANK:
        return _OF_RANK[name]
    return _FIGURES[name][0] if name in _FIGURES else f"{name} of the run.".replace("_", " ")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _import(module: str, package: str) -> Any:
    """Import a module of an optional package; FXP601 if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as why:
        raise error(
            "FXP601", where=f"the package {package}", why=f"It cannot be imported: {why}.",
            fix=f"pip install {package}",
        ) from why  # fmt: skip
