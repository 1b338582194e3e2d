"""What rank processes run for the tests of recordings: plain data to compare."""

from __future__ import annotations

from typing import Any

import hand_lanes
import msgspec
from hand_stages import ADAMW, batch, branches, language
from runtime_programs import make

from fxpart.runtime import Trainer, connect
from fxpart.schedule.measured_timeline import MeasuredTimeline

WARM, RECORDED = 2, 3


def pipeline(cut: tuple[int, ...], options: dict[str, Any]) -> Trainer:
    """A trainer of :func:`hand_stages.language`."""
    return make(language(cut), connect(len(cut)), **options)


Outcome = tuple[list[float], bytes]


def train(cut: tuple[int, ...], options: dict[str, Any], recorded: bool) -> Outcome:
    """Losses of five steps, and the recording of the last three as JSON, if it was made."""
    return _run(pipeline(cut, options), batch, recorded)


def train_branches(recorded: bool) -> Outcome:
    """The same of two branches beside each other, whose sums of shared parameters come late."""
    made = make(branches(), connect(4), microbatches=6)
    return _run(made, lambda seed: batch(12, seed=seed), recorded)


def train_lanes(mesh: str, options: dict[str, Any], recorded: bool) -> Outcome:
    """The same of a sharded program: two stages on a mesh."""
    ranks = 1
    for axis in mesh.split(","):
        ranks *= int(axis.partition("=")[2])
    made = hand_lanes.trainer(connect(2 * ranks), mesh, **{"optimizer": ADAMW} | options)
    return _run(made, lambda seed: hand_lanes.batch(12, seed=seed), recorded)


def _run(trainer: Trainer, batches: Any, recorded: bool) -> Outcome:
    losses = [float(trainer.step(batches(seed=seed))) for seed in range(WARM)]
    seeds = range(WARM, WARM + RECORDED)
    if not recorded:
        return [*losses, *(float(trainer.step(batches(seed=seed))) for seed in seeds)], b""
    with trainer.record() as recorder:
        losses += [float(trainer.step(batches(seed=seed))) for seed in seeds]
    return losses, msgspec.json.encode(recorder.recording)


def read(raw: bytes) -> MeasuredTimeline:
    """The recording again."""
    return msgspec.json.decode(raw, type=MeasuredTimeline)
