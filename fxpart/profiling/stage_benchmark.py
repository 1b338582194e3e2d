"""Time the stages of candidate plans in several turns.

Times of stages are compared with each other and with those of the whole model. Therefore each turn
runs all stages, so that a temporary slowdown of the machine affects all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fxpart.codegen.stage_key import FIRST, stage_key
from fxpart.costmodels.profile_store import TIMED, StageMeasurement
from fxpart.profiling.outliers import timing
from fxpart.profiling.rotation import LEAST_STEPS, Rotation, StageSamples
from fxpart.profiling.stage_run import StageRun, Values
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.batch.batch_reader import BatchReader
from fxpart.runtime.batch.mesh_rank_batch import BatchSlicer, get_row_multiple
from fxpart.runtime.batch.symbolic_shapes import Sizes

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel

TURNS = 3


@dataclass(frozen=True)
class StageBenchmarkInput:
    """Stages of one program to time at one microbatch size, on the first mesh rank.

    labels: descriptions for users. mine: stages to time, None for all; others only produce inputs.
    """

    spec: ProgramSpec
    sources: tuple[str, ...]
    microbatches: int
    labels: tuple[str, ...]
    mine: frozenset[int] | None = None

    @property
    def timed(self) -> list[int]:
        """The indices of stages to time."""
        return [k for k in range(len(self.sources)) if self.mine is None or k in self.mine]


def microbatch(captured: CapturedModel, spec: ProgramSpec, count: int) -> tuple[Values, Sizes, int]:
    """Return tensors, sizes and rows of the first (largest) of ``count`` microbatches."""
    (values, *_), sizes, rows = microbatches(captured, spec, count)
    return values, sizes, rows


def microbatches(
    captured: CapturedModel, spec: ProgramSpec, count: int
) -> tuple[list[Values], Sizes, int]:
    """Return up to TIMED of ``count`` microbatches: tensors, their common size, and rows.

    They have the size of the first one. If a stage has several ranks, the tensors are those of the
    first mesh rank, and the rows those of all. Several are needed because each looks up other rows
    of embedding tables, all of which an update processes.
    """
    assert captured.example is not None, "a captured model has an example"
    whole = BatchReader(spec, get_row_multiple(spec)).read(captured.example(), count)
    cut = BatchSlicer(spec, 0).read(whole)
    count = len(cut.inputs)
    equal = [k for k in range(count) if cut.sizes[k] == cut.sizes[0]]
    values = [dict(cut.inputs[k]) for k in equal[:TIMED]]
    return values, cut.sizes[0], cut.rows[0]


def keys_of(work: StageBenchmarkInput, sizes: Sizes, optimizer: str) -> list[str]:
    """Return the key of each stage."""
    return [
        stage_key(source, work.spec, index, sizes, optimizer)
        for index, source in enumerate(work.sources)
    ]


@dataclass(frozen=True)
class _StageMetadata:
    """Data of a timed stage apart from its times.

    microbatches: per update. parts: predictions, by whether gradients are already present.
    """

    rows: int
    microbatches: int
    label: str
    parts: dict[bool, dict[str, float]]


PredictParts = Callable[[int, int, int, bool], dict[str, float]]


def _metadata_of(
    work: StageBenchmarkInput, stage: int, rows: int, count: int, parts: PredictParts | None
) -> _StageMetadata:
    expected = {
        later: {} if parts is None else parts(stage, rows, count, later) for later in (False, True)
    }
    return _StageMetadata(rows, count, work.labels[stage], expected)


@dataclass
class StageBenchmark:
    """Times stages on a device in several turns. optimizer: as given. name: its name.

    together: each microbatch passes through all stages of a plan, as these share a host's caches;
    otherwise each stage is timed alone.
    """

    captured: CapturedModel
    optimizer: Any
    name: str
    device: torch.device
    together: bool = True
    _samples: dict[str, list[StageSamples]] = field(default_factory=dict, init=False)
    _metadata: dict[str, _StageMetadata] = field(default_factory=dict, init=False)

    def keys(self, work: StageBenchmarkInput) -> list[str]:
        """Return the keys of a program's stages that :meth:`turn` times."""
        _, sizes, _ = microbatches(self.captured, work.spec, work.microbatches)
        keys = keys_of(work, sizes, self.name)
        return [keys[k] for k in work.timed]

    def turn(
        self,
        work: StageBenchmarkInput,
        known: Container[str],
        *,
        seconds: float = 1.0,
        left: Callable[[], float] = lambda: 1e9,
        parts: PredictParts | None = None,
    ) -> list[str]:
        """Time a program's stages once; return the keys of the timed stages, in order.

        Stages with a key in ``known`` and repeated keys are skipped. seconds: for each stage. left:
        returns the remaining seconds. parts(stage, rows, microbatches, later): predictions to store
        in :class:`StageMeasurement`.
        """
        every, sizes, rows = microbatches(self.captured, work.spec, work.microbatches)
        timed_on = [{n: t.to(self.device) for n, t in values.items()} for values in every]
        keys = keys_of(work, sizes, self.name)
        wanted = [k for k in work.timed if keys[k] not in known]
        timed: list[str] = []
        for group in self._groups(wanted, len(keys)):
            if left() <= 0:
                break
            runs = [self._run(work, index) for index in group]
            new = {keys[k]: k for k in group if k in wanted and keys[k] not in timed}
            if new:
                found = Rotation(runs, timed_on).samples(seconds * len(new), self._least(new))
                for key, k in new.items():
                    self._samples.setdefault(key, []).append(found[k - group.start])
                    self._metadata.setdefault(key, _metadata_of(work, k, rows, len(every), parts))
                timed += new
            for run in runs if group.stop < len(keys) else ():
                for values in timed_on:
                    run.pass_on(run.forward(values, train=False), values)
            del runs
            gc.collect()
        return timed

    def _least(self, keys: Iterable[str]) -> int:
        """Return the minimum of steps: one if all keys were timed in earlier turns."""
        return 1 if all(self._samples.get(key) for key in keys) else LEAST_STEPS

    def _groups(self, wanted: Sequence[int], count: int) -> list[range]:
        """Return the ranges of stages that are timed together."""
        if self.together:
            return [range(count)] if wanted else []
        return [range(k, k + 1) for k in range(max(wanted, default=-1) + 1)]

    def timings(self) -> dict[str, StageMeasurement]:
        """Return two measurements per key over all turns: of first and of later microbatches."""
        found: dict[str, StageMeasurement] = {}
        for key, every in self._samples.items():
            metadata = self._metadata[key]
            forward = timing(_joined(s.forward for s in every))
            optimizer = timing(_joined(s.optimizer for s in every))
            for later in (False, True):
                back = _joined(s.later if later else s.first for s in every)
                found[key + ("" if later else FIRST)] = StageMeasurement(
                    forward=forward,
                    backward=timing(back),
                    optimizer=optimizer,
                    rows=metadata.rows,
                    microbatches=metadata.microbatches,
                    label=metadata.label,
                    parts=metadata.parts[later],
                )
        return found

    def _run(self, work: StageBenchmarkInput, index: int) -> StageRun:
        return StageRun(
            work.spec, index, work.sources[index], self.captured.state, self.optimizer, self.device
        )


def _joined(turns: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(turns))
