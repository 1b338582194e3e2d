"""Checkpoints to test with: random tensors, laid over ranks in every way that plans have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.checkpoint import folder
from fxpart.checkpoint.dtypes import DTYPES, itemsize
from fxpart.checkpoint.manifest import CheckpointManifest
from fxpart.checkpoint.manifest_merge import merge
from fxpart.checkpoint.regions import TensorRegion
from fxpart.checkpoint.signature import SigningKey
from fxpart.checkpoint.writer import PLAN, CheckpointShard, RankManifest, write_rank, write_text

Array = Any


def indices(region: TensorRegion, shape: tuple[int, ...]) -> Array:
    """The row-major numbers of the region's elements, in its order: the slow and sure way."""
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for dim, ranges in enumerate(region.ranges):
        picked = [n for start, stop in ranges for n in range(start, stop)]
        numbers = np.take(numbers, np.array(picked, dtype=np.int64), axis=dim)
    return numbers if region.flat is None else numbers.reshape(-1)[slice(*region.flat)]


def part(whole: Array, region: TensorRegion) -> Array:
    """The region's bytes of a tensor given as bytes [*shape, itemsize], by :func:`indices`."""
    shape = whole.shape[:-1]
    return whole.reshape(-1, whole.shape[-1])[indices(region, shape)]


def split(shape: tuple[int, ...], draw: random.Random) -> list[TensorRegion]:
    """Regions that cover a tensor once: cut along dims, in one range or several, and flat."""
    dims: list[list[tuple[tuple[int, int], ...]]] = []
    for size in shape:
        ways = draw.choice([1, 1, 2, 3])
        places = sorted(draw.randint(0, size) for _ in range(ways * draw.choice([1, 2]) - 1))
        ends = [0, *places, size]
        pieces = list(pairwise(ends))
        dims.append([tuple(pieces[way::ways]) for way in range(ways)])
    boxes: list[tuple[Any, ...]] = [()]
    for dim in dims:
        boxes = [(*box, ranges) for box in boxes for ranges in dim]
    found = []
    for box in boxes:
        whole = TensorRegion(box)
        if draw.random() < 0.5:
            found.append(whole)
            continue
        ways = draw.randint(1, 4)
        ends = sorted(draw.randint(0, whole.elements) for _ in range(ways - 1))
        for start, stop in zip([0, *ends], [*ends, whole.elements], strict=True):
            found.append(TensorRegion(box, (start, stop)))
    return found


@dataclass
class Sample:
    """Tensors as bytes by key, with dtypes; written with ``save``."""

    tensors: dict[str, Array] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, seed: int, *, most: int = 7, count: int = 6, seen: Sequence[str] = ()) -> Sample:
        """Random bytes in random shapes; every dtype in turn."""
        draw, made = random.Random(seed), cls()
        numbers = np.random.default_rng(seed)
        names = list(DTYPES)
        for index in range(count):
            shape = tuple(draw.randint(0 if index == 1 else 1, most) for _ in range(index % 4))
            dtype = seen[index % len(seen)] if seen else names[(seed + index) % len(names)]
            key = f"model/h.{index}.weight"
            size = (*shape, itemsize(dtype))
            made.tensors[key] = numbers.integers(0, 256, size, dtype=np.uint8)
            made.dtypes[key] = dtype
        return made

    def pieces(self, world: int, draw: random.Random) -> list[list[CheckpointShard]]:
        """The tensors over ranks at random."""
        found: list[list[CheckpointShard]] = [[] for _ in range(world)]
        for key, whole in self.tensors.items():
            for region in split(whole.shape[:-1], draw):
                data = np.ascontiguousarray(part(whole, region))
                found[draw.randrange(world)].append(
                    CheckpointShard(
                        key, self.dtypes[key], whole.shape[:-1], region.ranges, region.flat, data
                    )
                )
        return found

    def save(
        self,
        root: Path,
        step: int = 1,
        *,
        world: int = 3,
        seed: int = 0,
        generation: int = 0,
        key: SigningKey | None = None,
    ) -> Path:
        """A complete checkpoint of ``world`` ranks."""
        partial = folder.begin(root, step, generation)
        pieces = self.pieces(world, random.Random(seed))
        written = [write_rank(partial, rank, mine) for rank, mine in enumerate(pieces)]
        return folder.commit(partial, manifest(partial, written, step, generation), key)


def manifest(
    partial: Path, written: list[RankManifest], step: int, generation: int = 0
) -> CheckpointManifest:
    """The manifest of what ranks have written, with a plan beside."""
    return merge(
        written, step=step, calls=step + 3, seed=11, fingerprint="f" * 64, plan="p" * 64,
        generation=generation, files={PLAN: write_text(partial, PLAN, '{"format":"none"}\n')},
        values={"optimizer/h.0.weight/step": step}, extra={"epoch": 2, "best": float("inf")},
        groups=[{"lr": 0.001, "betas": (0.9, 0.95), "params": ["h.0.weight"]}],
    )  # fmt: skip
