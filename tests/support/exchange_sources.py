"""A small checkpoint for the tests of exchange, in memory and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fxpart.checkpoint import folder
from fxpart.checkpoint.exchange.source import CheckpointMetadata, RankShard, TensorType
from fxpart.checkpoint.manifest import Ranges
from fxpart.checkpoint.manifest_merge import merge
from fxpart.checkpoint.writer import PLAN, CheckpointShard, write_rank, write_text

REST = CheckpointMetadata(
    step=120, calls=130, seed=7, fingerprint="f" * 16, plan="p", plan_text='{"plan": 1}',
    values={"optimizer/h.0.weight/amsgrad": False},
    groups=[{"lr": 0.1, "betas": (0.9, 0.999), "max": float("inf"), "params": ["h.0.weight"]}],
    extra={"epoch": 3},
)  # fmt: skip
OUTLINES = {
    "model/h.0.weight": TensorType("float32", (6, 4)),
    "model/h.0.bias": TensorType("bfloat16", (6,)),
    "model/häd.weight": TensorType("float16", (3, 2, 5)),
    "model/empty": TensorType("float32", (0, 4)),
    "model/mask": TensorType("bool", (5,)),
    "optimizer/h.0.weight/exp_avg": TensorType("float32", (6, 4)),
    "optimizer/h.0.weight/step": TensorType("float32", ()),
    "optimizer/h.0.bias/exp_avg": TensorType("bfloat16", (6,)),
}
MORE = {
    "model/rope": TensorType("complex128", (2, 3)),
    "random/0/torch": TensorType("uint8", (40,)),
    "buffer/seen": TensorType("int64", (2,)),
}


class Numbers:
    """Random bytes under given outlines."""

    def __init__(self, outlines: Mapping[str, TensorType], rest: CheckpointMetadata = REST) -> None:
        self.tensors = dict(outlines)
        self.rest = rest
        draw = np.random.default_rng(3)
        self.data = {
            key: np.frombuffer(draw.bytes(outline.size), np.uint8) % 2
            if outline.dtype == "bool"
            else np.frombuffer(draw.bytes(outline.size), np.uint8)
            for key, outline in outlines.items()
        }

    def read(self, key: str) -> np.ndarray:
        return self.data[key].copy()

    def layout(self, key: str) -> Sequence[RankShard]:
        return ()


def same(found, numbers: Numbers, *, left_out: Sequence[str] = ()) -> None:
    """Every tensor bit by bit."""
    wanted = {key: o for key, o in numbers.tensors.items() if key not in left_out}
    assert dict(found.tensors) == wanted
    for key in wanted:
        assert found.read(key).tobytes() == numbers.data[key].tobytes(), key


def checkpoint(root: Path, numbers: Numbers, cuts: Mapping[str, Sequence[tuple[int, object]]]):
    """A checkpoint of two ranks; cuts: by key, (rank, ranges) of each part, else all on rank 0."""
    partial = folder.begin(root, numbers.rest.step, 1)
    pieces: dict[int, list[CheckpointShard]] = {0: [], 1: [], 2: [], 3: []}
    for key, outline in numbers.tensors.items():
        whole = numbers.data[key].reshape(*outline.shape, outline.itemsize)
        for rank, ranges in cuts.get(key, [(0, tuple(((0, n),) for n in outline.shape))]):
            held: tuple[Ranges, ...] = ranges  # type: ignore[assignment]
            lines = [[i for start, stop in dim for i in range(start, stop)] for dim in held]
            data = whole[np.ix_(*lines)] if held else whole
            data = np.ascontiguousarray(data)
            pieces[rank].append(
                CheckpointShard(key, outline.dtype, outline.shape, held, None, data)
            )
    written = [write_rank(partial, rank, mine) for rank, mine in pieces.items()]
    rest = numbers.rest
    manifest = merge(
        written, step=rest.step, calls=rest.calls, seed=rest.seed, fingerprint=rest.fingerprint,
        plan=rest.plan, generation=1, values=rest.values, groups=rest.groups, extra=rest.extra,
        files={PLAN: write_text(partial, PLAN, rest.plan_text)},
    )  # fmt: skip
    return folder.commit(partial, manifest)
