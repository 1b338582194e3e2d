"""What rank processes run for the tests of mesh ranks: each returns plain data to compare."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from hand_lanes import Whole, batch, trainer
from runtime_programs import Faulty, bits

from fxpart.errors import FxpartError
from fxpart.runtime import connect
from fxpart.sharding import Mesh

ADAMW = partial(torch.optim.AdamW, lr=0.01)
Numbers = dict[str, Any]


def numbers(tensors: dict[str, torch.Tensor]) -> Numbers:
    return {name: t.tolist() for name, t in tensors.items()}


def ranks_of(mesh: str, options: Mapping[str, Any] | None = None) -> int:
    """Two stages, or so many replicas of them, of so many mesh ranks."""
    return sum((options or {}).get("counts", (1, 1))) * Mesh.parse(mesh).size


def train(mesh: str, options: dict[str, Any], rows: tuple[int, ...] = (12, 12, 6)) -> list[Numbers]:
    """Steps: loss, gradients before and after the update, norm, parameters, optimizer state."""
    made = trainer(
        connect(ranks_of(mesh, options)), mesh, **{"optimizer": ADAMW, "clip_norm": 0.5} | options
    )
    found = []
    for seed, count in enumerate(rows):
        loss = made.backward(batch(count, seed=seed))
        before = made.gradients()
        made.update()
        norm = made.last_grad_norm
        found.append(
            {
                "loss": loss.item(),
                "before": numbers(before),
                "after": numbers(made.gradients()),
                "norm": None if norm is None else norm.item(),
                "state": numbers(made.state_dict()),
                "optimizer": {
                    name: {key: torch.as_tensor(v).tolist() for key, v in slots.items()}
                    for name, slots in made.optimizer_state_dict()["state"].items()
                },
            }
        )
    return found


def move(
    mesh: str, options: dict[str, Any], saved: dict[str, Any] | None, first_only: bool = False
) -> dict[str, Any]:
    """Train and save, or load what was saved; then the losses of two more steps."""
    made = trainer(connect(ranks_of(mesh, options)), mesh, **{"optimizer": ADAMW} | options)
    if saved is None:
        for seed in range(2):
            made.step(batch(seed=seed))
    else:
        made.load_state_dict({n: torch.tensor(v) for n, v in saved["model"].items()})
        state = {
            n: {k: torch.tensor(v) for k, v in slots.items()}
            for n, slots in saved["optimizer"]["state"].items()
        }
        made.load_optimizer_state_dict({**saved["optimizer"], "state": state})
    optimizer = made.optimizer_state_dict(first_only=first_only)
    found = {
        "model": numbers(made.state_dict(first_only=first_only)),
        "optimizer": {
            "state": {
                n: {k: torch.as_tensor(v).tolist() for k, v in slots.items()}
                for n, slots in optimizer.get("state", {}).items()
            },
            "param_groups": optimizer.get("param_groups", []),
        },
    }
    after = [made.step(batch(seed=seed)).item() for seed in (5, 6)]
    return {"saved": found, "after": after}


def checkpoint(
    directory: str, mesh: str, options: dict[str, Any], other: str, more: dict[str, Any]
) -> dict[str, Any]:
    """Train, save with torch.distributed.checkpoint, load into another sharding."""
    import torch.distributed.checkpoint as dcp

    made = trainer(connect(ranks_of(mesh)), mesh, **{"optimizer": ADAMW} | options)
    for seed in range(2):
        made.step(batch(seed=seed))
    parts = made.state_dict(sharded=True)
    dcp.save(parts, checkpoint_id=directory)
    expected = made.state_dict()
    again = trainer(connect(ranks_of(other)), other, **{"optimizer": ADAMW} | more)
    wanted = again.state_dict(sharded=True)
    dcp.load(wanted, checkpoint_id=directory)
    again.load_state_dict(wanted)
    same = bits(again.state_dict()) == bits(expected)
    again.load_state_dict(parts)  # laid out in another way
    return {
        "names": sorted(parts),
        "shapes": {n: list(t.shape) for n, t in parts.items()},
        "local": {n: list(t.to_local().shape) for n, t in parts.items()},
        "same": same,
        "moved": bits(again.state_dict()) == bits(expected),
    }


def fail(
    mesh: str, stage: int, what: str, mesh_ranks: tuple[int, ...], timeout: float = 60.0
) -> dict[str, Any]:
    """One step with a fault on some mesh ranks of a stage, then, where that can be, one good
    step."""
    made = trainer(connect(ranks_of(mesh), timeout=timeout), mesh)
    for mesh_rank in made.parts.mesh_ranks:
        if mesh_rank.index in mesh_ranks and stage in mesh_rank.modules:
            module = mesh_rank.modules[stage]
            module.forward = Faulty(made, module, what, 2)
    before = bits(made.state_dict())
    problems: list[Any] = []
    start = time.monotonic()
    try:
        made.step(batch())
    except FxpartError as failure:
        problems = [(p.code, p.where, p.why) for p in failure.problems]
    found: dict[str, Any] = {"problems": problems, "seconds": time.monotonic() - start}
    if timeout == 60.0:  # nothing was lost: all goes on
        found["unchanged"] = bits(made.state_dict()) == before
        found["gradients"] = len(made.gradients())
    try:
        found["next"] = made.step(batch()).item()
    except FxpartError as failure:
        found["again"] = failure.problems[0].code
    return found


def refuse(mesh: str, rows: int) -> list[tuple[str, str, str, str]]:
    """A batch with a number of rows that is refused; then a good step."""
    made = trainer(connect(ranks_of(mesh)), mesh)
    try:
        made.step(batch(rows))
    except FxpartError as failure:
        made.step(batch(6))
        return [(p.code, p.where, p.why, p.fix) for p in failure.problems]
    return []


def one_process(rows: tuple[int, ...] = (12, 12, 6)) -> list[dict[str, Any]]:
    """What :func:`lane_programs.train` gives, by autograd and torch's own clipping."""
    whole, found = Whole(ADAMW, 0.5), []
    for seed, count in enumerate(rows):
        loss = whole.backward(batch(count, seed=seed))
        before = {n: p.grad.clone() for n, p in whole.p.items() if p.grad is not None}
        whole.update()
        assert whole.norm is not None
        state = {n: whole.optimizer.state[p] for n, p in whole.p.items()}
        found.append(
            {
                "loss": loss, "before": before, "after": whole.gradients, "norm": whole.norm,
                "state": {n: t.clone() for n, t in whole.state().items()},
                "optimizer": {n: {k: v.clone() for k, v in s.items()} for n, s in state.items()},
            }
        )  # fmt: skip
    return found


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Equal within 1e-6 of the largest number of each tensor."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where} {key}")
        return
    got = torch.as_tensor(found)
    assert got.shape == expected.shape, where
    difference = float((got - expected).abs().max())
    assert difference <= 1e-6 * max(float(expected.abs().max()), 1e-2), f"{where}: {difference}"
