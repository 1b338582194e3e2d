"""Hybrid sharding: results of one process, what ranks store and send, and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_programs import HYBRID, OPTIMIZER, batch, compiled, train, train_on_rank, train_plainly
from ranks import Pool

from fxpart.runtime.trainer import Trainer

# Elements of the parameters; the scale has no dims, and is not sharded.
SIZES = {
    "up.weight": 60, "up.bias": 10, "norm.weight": 10, "norm.bias": 10, "down.weight": 70,
    "down.bias": 7,
}  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh", ["dp=4", pytest.param("dp=4,tp=2", marks=pytest.mark.slow)]
)  # fmt: skip
def test_trains_like_one_process(zero: int, mesh: str) -> None:
    """With clipping by the norm, and gradients accumulated over batches and microbatches."""
    options: dict[str, Any] = {"cluster": f"local:{8 if 'tp' in mesh else 4}"}
    program = compiled(**{**HYBRID, "mesh": mesh, "zero": zero}, **options)
    assert program.plan.sharding is not None
    assert program.plan.sharding.mesh == mesh.replace("dp=4", "dp=2,dp_shard=2")
    (losses, state), (expected, wanted) = train(program), train_plainly()
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_trains_like_one_process_over_gloo(zero: int, pool: Pool) -> None:
    """Four processes as two groups of two, which share shards."""
    expected, wanted = train_plainly()
    weights = {name: tensor.tolist() for name, tensor in wanted.items()}
    plan = compiled(**HYBRID, zero=zero).plan.dumps()
    for losses, difference in pool.run(train_on_rank, plan, weights, ranks=4, timeout=120):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-5


def count_optimizer_elements(trainer: Trainer, mesh_rank: int) -> int:
    """The elements of each moment that a mesh rank stores of the sharded parameters."""
    assert trainer.optimizer is not None
    found = 0
    for entry in trainer.parts.state.entries.values():
        for (_, at), parameter in entry.copies.items():
            if at == mesh_rank:
                state = trainer.optimizer.state[trainer.parts.shards.of(parameter)]
                found += state["exp_avg"].numel() if parameter.dim() else 0
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_collectives_and_state(zero: int) -> None:
    """Gradients are reduce-scattered in a group, and their shards all-reduced between groups.

    ZeRO 1 and 2 gather each parameter once per step over the group. ZeRO 3 gathers it in each
    forward, and for each backward what autograd has saved: the norm and the last product's weight.
    ZeRO 2 and 3 reduce-scatter in every microbatch. Nothing but shards is sent over dp.
    """
    program = compiled(**HYBRID, zero=zero)
    gathered = re.findall(r'all_gather\(self.mesh, \S+, "(\w+)"', program.sources[0])
    assert gathered == (["dp_shard"] * len(SIZES) if zero == 3 else [])
    trainer = program.trainer(OPTIMIZER)
    trainer.step(batch(0))
    assert trainer.parts.meshes is not None
    counts = [trainer.parts.meshes.of(0, rank).counts for rank in range(4)]
    for each in counts:
        each.clear()
    trainer.step(batch(1))
    whole = sum(SIZES.values())
    saved = sum(SIZES[name] for name in ("norm.weight", "norm.bias", "down.weight"))
    gathers = 2 * (whole + saved) if zero == 3 else whole
    first = sum(-(-size // 2) for size in SIZES.values())
    for rank, each in enumerate(counts):
        sent = {key: int(size) // 4 for key, size in each.bytes.items()}
        shard = whole - first if rank % 2 else first
        assert sent.pop(("all_gather", "dp_shard")) == gathers
        assert sent.pop(("reduce_scatter", "dp_shard")) == whole * (1 if zero == 1 else 2)
        assert {kind for kind, _ in sent} == {"all_reduce"}
        between = sum(size for (_, axes), size in sent.items() if axes == "dp")
        others = sum(size for (_, axes), size in sent.items() if axes != "dp")
        assert shard <= between <= shard + 8, "besides, the scale and losses"
        assert others <= 16
        assert count_optimizer_elements(trainer, rank) == shard
    trainer.close()


@pytest.mark.slow
def test_checkpoints_load_into_other_layouts(tmp_path: Path) -> None:
    """Hybrid, full and no sharding continue from one another's checkpoints, with equal state."""
    ways: dict[str, dict[str, Any]] = {
        "hybrid 1": {**HYBRID, "zero": 1},
        "hybrid 2": {**HYBRID, "zero": 2},
        "hybrid 3": {**HYBRID, "zero": 3},
        "full 3": {"mesh": "dp=4", "stages": 1, "zero": 3},
        "none": {"mesh": "dp=2", "stages": 1},
        "hybrid 2 of 2 stages": {"mesh": "dp=4", "stages": 2, "shard_degree": 2, "zero": 2},
    }
    programs = {
        name: compiled(cluster="local:8" if "stages" in name else "local:4", **way)
        for name, way in ways.items()
    }
    for name in ("hybrid 1", "hybrid 2", "hybrid 3", "full 3"):
        old = programs[name].trainer(OPTIMIZER, clip_norm=0.3)
        for seed in range(3):
            old.step(batch(seed))
        folder = tmp_path / name
        saved = old.save_checkpoint(folder)
        state, moments = old.state_dict(), old.optimizer_state_dict()["state"]
        state = {key: tensor.clone() for key, tensor in state.items()}
        expected = float(old.step(batch(7)).detach())
        after = {key: tensor.clone() for key, tensor in old.state_dict().items()}
        old.close()
        for other, program in programs.items():
            new = program.trainer(OPTIMIZER, clip_norm=0.3)
            new.step(batch(11))
            new.load_checkpoint(saved)
            for key, tensor in new.state_dict().items():
                assert torch.equal(tensor, state[key]), (name, other, key)
            for key, known in new.optimizer_state_dict()["state"].items():
                assert torch.equal(known["exp_avg_sq"], moments[key]["exp_avg_sq"]), (name, other)
            assert float(new.step(batch(7)).detach()) == pytest.approx(expected, rel=1e-5)
            for key, tensor in new.state_dict().items():
                torch.testing.assert_close(tensor, after[key], rtol=1e-4, atol=1e-6)
            new.close()
