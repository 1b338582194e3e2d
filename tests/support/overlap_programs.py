"""What rank processes (and one process) run for the tests of sums that start early."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hand_lanes import First, batch, trainer
from lane_programs import ADAMW, numbers, ranks_of
from runtime_programs import Faulty, bits

from fxpart.errors import FxpartError
from fxpart.runtime import Trainer, connect
from fxpart.runtime.gradients import buckets, reduce_scatter, reducer
from fxpart.runtime.gradients.reducer import StageGradientReducer

Started = list[tuple[str, int, int]]  # (while what, stage's bucket, elements)


@contextmanager
def small_buckets(size: int) -> Iterator[None]:
    """Buckets of so many bytes for trainers that are made meanwhile."""
    before = reduce_scatter.BUCKET, buckets.FIRST
    reduce_scatter.BUCKET = buckets.FIRST = size
    try:
        yield
    finally:
        reduce_scatter.BUCKET, buckets.FIRST = before


def make(mesh: str, options: dict[str, Any], size: int) -> Trainer:
    with small_buckets(size):
        return trainer(connect(ranks_of(mesh)), mesh, **{"optimizer": ADAMW} | options)


def train(
    mesh: str,
    options: dict[str, Any],
    *,
    size: int = 100,
    early: bool = True,
    calls: int = 1,
    rows: Sequence[int] = (12, 12, 6),
    room: int = 4,
) -> dict[str, Any]:
    """Steps of ``calls`` batches each; early: by ``step``, else by ``backward`` and ``update``."""
    reducer.UNDER_WAY = room
    try:
        made = make(mesh, options, size)
        losses = []
        for index, count in enumerate(rows):
            for call in range(calls):
                given = batch(count, seed=index + 10 * call)
                if early:
                    losses.append(made.step(given, accumulate=call < calls - 1).item())
                else:
                    losses.append(made.backward(given).item())
            if not early:
                made.update()
        norm = made.last_grad_norm
        return {
            "losses": losses,
            "gradients": bits(made.gradients()),
            "norm": None if norm is None else norm.item(),
            "state": bits(made.state_dict()),
            "numbers": numbers(made.state_dict()),
        }
    finally:
        reducer.UNDER_WAY = 4


def order(mesh: str, options: dict[str, Any], size: int) -> list[dict[int, list[Any]]]:
    """Per step and stage what this process's mesh ranks have started, and whether in a backward."""
    made = make(mesh, options, size)
    found: list[dict[int, list[Any]]] = []
    start = StageGradientReducer._start
    places = {id(each): place for place, each in made.parts.shards._reducers.items()}

    def note(self: StageGradientReducer, bucket: Any) -> None:
        stage, mesh_rank = places[id(self)]
        names = [tuple(term.parameter.shape) for term in bucket.terms]
        found[-1].setdefault(stage, []).append((mesh_rank, self.armed, names))
        start(self, bucket)

    StageGradientReducer._start = note  # type: ignore[method-assign]
    try:
        for seed in range(3):
            found.append({})
            made.step(batch(12, seed=seed))
    finally:
        StageGradientReducer._start = start  # type: ignore[method-assign]
    return found


def fail(
    mesh: str, options: dict[str, Any], what: str, at: int, mesh_ranks: tuple[int, ...]
) -> Any:
    """Two good steps, one with a fault in stage 0 of some mesh ranks, two good steps."""
    made = make(mesh, options, 100)
    made.step(batch(12, seed=0))
    made.step(batch(12, seed=1))
    modules = [
        (mesh_rank.index, module)
        for mesh_rank in made.parts.mesh_ranks
        for module in mesh_rank.modules.values()
        if isinstance(module, First)
    ]
    before, problems, begun = made.state_dict(), [], time.monotonic()
    for index, module in modules:
        if index in mesh_ranks:
            module.forward = Faulty(made, module, what, at)  # type: ignore[method-assign]
    try:
        made.step(batch(12, seed=2))
    except FxpartError as failure:
        problems = [(p.code, p.where, p.why) for p in failure.problems]
    seconds = time.monotonic() - begun
    for _, module in modules:
        vars(module).pop("forward", None)
    unchanged = bits(before) == bits(made.state_dict())
    left = len(made.gradients())
    for seed in (3, 4):
        made.step(batch(12, seed=seed))
    return {
        "problems": problems, "seconds": seconds, "unchanged": unchanged, "left": left,
        "state": bits(made.state_dict()),
    }  # fmt: skip


def good(mesh: str, options: dict[str, Any]) -> dict[str, bytes]:
    """The steps of :func:`fail` without the one that fails."""
    made = make(mesh, options, 100)
    for seed in (0, 1, 3, 4):
        made.step(batch(12, seed=seed))
    return bits(made.state_dict())


def absent(mesh: str, missing: tuple[int, ...], zero: int) -> dict[str, Any]:
    """Steps in which the mesh ranks ``missing`` do not use the MLP."""
    made = make(mesh, {"zero": zero, "optimizer": torch.optim.AdamW}, 100)

    def short(module: Any) -> Any:
        def forward(key: int, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (torch.nn.functional.embedding(ids, module.e),)

        return forward

    for mesh_rank in made.parts.mesh_ranks:
        for module in mesh_rank.modules.values():
            if isinstance(module, First) and mesh_rank.index in missing:
                module.forward = short(module)  # type: ignore[method-assign]
    for seed in range(3):
        made.step(batch(12, seed=seed))
    return {"state": numbers(made.state_dict()), "gradients": sorted(made.gradients())}
