"""Many tiny steps on real ranks, and what each process holds meanwhile.

Looked at: resident memory, open descriptors, threads, and Python's own objects, which tell a small
leak long before pages do.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import hand_lanes
import hand_stages
import torch
from ranks import Pool
from runtime_programs import make

from fxpart.errors import FxpartError
from fxpart.runtime import Trainer, connect
from fxpart.runtime.monitor.memory_footprint import read_resident_bytes

KINDS = ("pipeline", "data")
SAMPLES = 40
# What may come and go without being a leak, between the two halves of the steps after warm-up.
MOST = {"memory": 1 << 20, "objects": 40, "descriptors": 0, "threads": 0, "os_threads": 0}


class Sample(NamedTuple):
    """What one process holds. memory: bytes; os_threads: also those that are not Python's."""

    step: int
    memory: int
    objects: int
    descriptors: int
    threads: int
    os_threads: int


def look(step: int) -> Sample:
    """A sample of this process."""
    gc.collect()
    return Sample(
        step,
        read_resident_bytes(),
        len(gc.get_objects()),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
    )


def run(
    pool: Pool, kind: str, steps: int, leak: str = "", timeout: float = 240.0
) -> list[list[Sample]]:
    """:func:`soak` on four ranks: the samples of each."""
    results = pool.run(soak, kind, steps, leak, ranks=4, timeout=timeout)
    return [[Sample(*numbers) for numbers in rank] for rank in results]


def soak(kind: str, steps: int, leak: str = "", timeout: float = 60.0) -> list[tuple[int, ...]]:
    """Steps of several kinds in turn; samples of this rank, the first quarter being warm-up.

    kind: "pipeline" (four stages, with a tie, a skip and a mask) or "data" (two stages of two mesh
    ranks, whose optimizer state is cut). leak: what to plant: "objects", "memory", "descriptors",
    "threads".
    """
    transport = connect(4, timeout=timeout)
    trainer, batch = _trainer(kind, transport)
    planted = _Leak(leak)
    gc.collect()
    gc.freeze()  # what is there already is not counted again and again
    found: list[tuple[int, ...]] = []
    try:
        every = max(1, steps // SAMPLES)
        for step in range(steps):
            _step(trainer, batch, step)
            planted.grow()
            if (step + 1) % every == 0:
                found.append(tuple(look(step + 1)))
    finally:
        trainer.close()
        planted.end()
        gc.unfreeze()
    return found


def _trainer(kind: str, transport: Any) -> tuple[Trainer, Callable[..., Any]]:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    if kind == "pipeline":
        hand = hand_stages.language((1, 1, 1, 1))
        options: dict[str, Any] = {"microbatches": 4, "optimizer": adamw, "clip_norm": 1.0}
        return make(hand, transport, **options), hand_stages.batch
    made = hand_lanes.trainer(transport, "dp=2", zero=1, optimizer=adamw, clip_norm=1.0)
    return made, hand_lanes.batch


def _step(trainer: Trainer, batch: Callable[..., Any], step: int) -> None:
    """Most are plain; others accumulate, are smaller or longer, are refused, or read the state."""
    if step % 50 == 17:
        trainer.step(batch(8, 5, seed=step), accumulate=True)
    if step % 50 == 29:
        given = batch(8, 5, seed=step)
        del given["labels"]
        with contextlib.suppress(FxpartError):
            trainer.step(given)
    if step % 50 == 43:
        trainer.state_dict(first_only=True)
        trainer.gradients()
    rows, length = ((8, 5), (8, 5), (8, 7), (4, 5))[step % 4]
    trainer.step(batch(rows, length, seed=step % 64))


class _Leak:
    """Something that grows with each call, and is taken back at the end."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0
        self.kept: list[Any] = []
        self.ends = threading.Event()

    def grow(self) -> None:
        self.calls += 1
        if self.kind == "objects":
            self.kept.append([self.calls])
        elif self.kind == "memory":
            # Of the system's own: what this process has freed before and kept would hide it.
            self.kept.append(mmap.mmap(-1, 16 << 10))
            for page in range(0, 16 << 10, mmap.PAGESIZE):
                self.kept[-1][page] = 1
        elif self.kind == "descriptors" and self.calls % 25 == 0:  # a few: none may be many
            self.kept.append(os.open(os.devnull, os.O_RDONLY))
        elif self.kind == "threads" and self.calls % 25 == 0:
            threading.Thread(target=self.ends.wait, daemon=True).start()

    def end(self) -> None:
        self.ends.set()
        if self.kind == "descriptors":
            for descriptor in self.kept:
                os.close(descriptor)


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """How much more there is in the last quarter of the samples than in the second, by median.

    The first quarter is warm-up. For descriptors and threads, whose number must not change at all,
    the difference between the most and the least after it.
    """
    quarter = len(samples) // 4
    early, late, after = samples[quarter : 2 * quarter], samples[-quarter:], samples[quarter:]
    found = {}
    for name in MOST:
        if MOST[name]:
            found[name] = _median(late, name) - _median(early, name)
        else:
            values = [getattr(sample, name) for sample in after]
            found[name] = max(values) - min(values)
    return found


def _median(samples: Sequence[Sample], name: str) -> int:
    values = sorted(getattr(sample, name) for sample in samples)
    return int(values[len(values) // 2])


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What has grown by more than it may."""
    return [name for name, by in growth(samples).items() if by > MOST[name]]
