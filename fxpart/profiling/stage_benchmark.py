"""The stages of candidate plans, each timed in several turns: what a machine does changes in time.

Times of one stage are compared with those of another, and with those of the whole model. So every
stage has its part of every turn, and what slows the machine down for some seconds counts for all.
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
    """The stages of one program to time at one microbatch size; where each is several ranks, the
    first lane's.

    labels: of the plan, for people. mine: those that are timed, None for all; the others run for
    what they give.
    """

    spec: ProgramSpec
    sources: tuple[str, ...]
    microbatches: int
    labels: tuple[str, ...]
    mine: frozenset[int] | None = None

    @property
    def timed(self) -> list[int]:
        """Which stages are."""
        return [k for k in range(len(self.sources)) if self.mine is None or k in self.mine]


def microbatch(captured: CapturedModel, spec: ProgramSpec, count: int) -> tuple[Values, Sizes, int]:
    """The first (largest) of ``count`` microbatches of the example batch: tensors, sizes, rows."""
    (values, *_), sizes, rows = microbatches(captured, spec, count)
    return values, sizes, rows


def microbatches(
    captured: CapturedModel, spec: ProgramSpec, count: int
) -> tuple[list[Values], Sizes, int]:
    """TIMED of ``count`` microbatches of one size, or the only one: tensors, that size, its rows.

    Those of the first one's size; where a stage is several ranks, the first lane's part of them,
    and the rows of all. Tables are asked for other rows by each, which an update then has to go
    through.
    """
    assert captured.example is not None, "a captured model has an example"
    whole = BatchReader(spec, get_row_multiple(spec)).read(captured.example(), count)
    cut = BatchSlicer(spec, 0).read(whole)
    count = len(cut.inputs)
    equal = [k for k in range(count) if cut.sizes[k] == cut.sizes[0]]
    values = [dict(cut.inputs[k]) for k in equal[:TIMED]]
    return values, cut.sizes[0], cut.rows[0]


def keys_of(work: StageBenchmarkInput, sizes: Sizes, optimizer: str) -> list[str]:
    """The key of each stage."""
    return [
        stage_key(source, work.spec, index, sizes, optimizer)
        for index, source in enumerate(work.sources)
    ]


@dataclass(frozen=True)
class _StageMetadata:
    """What is said of a timed stage beside its times.

    microbatches: before an update. parts: by whether gradients are there.
    """

    rows: int
    microbatches: int
    label: str
    parts: dict[bool, dict[str, float]]


Thought = Callable[[int, int, int, bool], dict[str, float]]


def _said(
    work: StageBenchmarkInput, stage: int, rows: int, count: int, parts: Thought | None
) -> _StageMetadata:
    thought = {
        later: {} if parts is None else parts(stage, rows, count, later) for later in (False, True)
    }
    return _StageMetadata(rows, count, work.labels[stage], thought)


@dataclass
class StageBenchmark:
    """Times stages on a device, turn by turn. optimizer: as given; name: its name.

    together: the stages of a plan take turns with each microbatch, as they share a host's caches;
    otherwise each has the device for itself.
    """

    captured: CapturedModel
    optimizer: Any
    name: str
    device: torch.device
    together: bool = True
    _samples: dict[str, list[StageSamples]] = field(default_factory=dict, init=False)
    _told: dict[str, _StageMetadata] = field(default_factory=dict, init=False)

    def keys(self, work: StageBenchmarkInput) -> list[str]:
        """Those of a program's stages that :meth:`turn` times."""
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
        parts: Thought | None = None,
    ) -> list[str]:
        """Time a program's stages once more; the keys of those that it timed, in order.

        Of those whose key is in ``known`` or was timed just before nothing is kept. seconds: for
        each stage. left: seconds that are left for all. parts(stage, rows, microbatches, later):
        what :class:`StageMeasurement` keeps of predictions.
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
                    self._told.setdefault(key, _said(work, k, rows, len(every), parts))
                timed += new
            for run in runs if group.stop < len(keys) else ():
                for values in timed_on:
                    run.pass_on(run.forward(values, train=False), values)
            del runs
            gc.collect()
        return timed

    def _least(self, keys: Iterable[str]) -> int:
        """Steps: one where all of these were timed in turns before."""
        return 1 if all(self._samples.get(key) for key in keys) else LEAST_STEPS

    def _groups(self, wanted: Sequence[int], count: int) -> list[range]:
        """Of so many stages those that are timed together."""
        if self.together:
            return [range(count)] if wanted else []
        return [range(k, k + 1) for k in range(max(wanted, default=-1) + 1)]

    def timings(self) -> dict[str, StageMeasurement]:
        """By key what all turns say, two for each: of a first microbatch, and of later ones."""
        found: dict[str, StageMeasurement] = {}
        for key, every in self._samples.items():
            said = self._told[key]
            forward = timing(_joined(s.forward for s in every))
            optimizer = timing(_joined(s.optimizer for s in every))
            for later in (False, True):
                back = _joined(s.later if later else s.first for s in every)
                found[key + ("" if later else FIRST)] = StageMeasurement(
                    forward=forward,
                    backward=timing(back),
                    optimizer=optimizer,
                    rows=said.rows,
                    microbatches=said.microbatches,
                    label=said.label,
                    parts=said.parts[later],
                )
        return found

    def _run(self, work: StageBenchmarkInput, index: int) -> StageRun:
        return StageRun(
            work.spec, index, work.sources[index], self.captured.state, self.optimizer, self.device
        )


def _joined(turns: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(turns))
