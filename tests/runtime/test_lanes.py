"""Sharded programs: equal to one process, whatever the mesh; failures; state in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hand_stages
import pytest
import torch
from hand_lanes import Whole, batch, data_parallel, trainer, weights
from lane_programs import assert_close, checkpoint, fail, move, one_process, ranks_of, refuse, train
from ranks import Pool

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess

MESHES = ["dp=2", "tp=2", "dp=2,tp=2", "tp=2,dp=2", "dp=3"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_sharded_program_trains_like_one_process(mesh: str, microbatches: int) -> None:
    """Losses, gradients before and after the update, norms, parameters, optimizer state."""
    found = train(mesh, {"microbatches": microbatches})
    for step, (mine, expected) in enumerate(zip(found, one_process(), strict=True)):
        assert_close(mine, expected, f"step {step}")


REPLICAS: list[tuple[str, dict[str, Any]]] = [
    ("tp=2", {"counts": (2, 1)}),
    ("dp=2", {"counts": (1, 3), "zero": 1}),
    ("dp=2,tp=2", {"counts": (2, 3), "zero": 2}),
    ("tp=2,dp=2", {"counts": (3, 1), "zero3": True, "schedule": "gpipe"}),
    ("dp=2", {"counts": (2, 2), "zero": 2, "microbatches": 1}),
]


@pytest.mark.parametrize(("mesh", "options"), REPLICAS)
def test_replicas_of_meshes_train_like_one_process(mesh: str, options: dict[str, Any]) -> None:
    """Also where microbatches do not divide by the round, or a replica has none."""
    found = train(mesh, {"microbatches": 5} | options)
    for step, (mine, expected) in enumerate(zip(found, one_process(), strict=True)):
        assert_close(mine, expected, f"step {step}")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_schedule_runs_lanes(schedule: str) -> None:
    found = train("dp=2,tp=2", {"schedule": schedule, "microbatches": 3})
    for mine, expected in zip(found, one_process(), strict=True):
        assert_close(mine, expected)


@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {}), *REPLICAS])
def test_gradients_may_be_looked_at_between_batches(mesh: str, options: dict[str, Any]) -> None:
    """They are whole, and looking changes nothing that is accumulated."""
    made, whole = trainer(InProcess(ranks_of(mesh, options)), mesh, **options), Whole()
    for seed in range(3):
        made.backward(batch(seed=seed))
        whole.backward(batch(seed=seed))
        expected = {n: p.grad for n, p in whole.p.items() if p.grad is not None}
        assert_close(made.gradients(), expected)
        assert_close(made.gradients(), expected)


@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {}), *REPLICAS])
def test_copies_of_one_parameter_stay_equal_in_every_bit(
    mesh: str, options: dict[str, Any]
) -> None:
    """Ties between stages, replicas on the mesh ranks of a stage, and replicas of stages."""
    made = trainer(InProcess(ranks_of(mesh, options)), mesh, **options)
    for seed in range(3):
        made.step(batch(seed=seed))
    for name, entry in made.parts.state.entries.items():
        shards: dict[tuple[Any, ...], bytes] = {}
        for (_, mesh_rank), tensor in entry.copies.items():
            where = entry.pieces.slices(mesh_rank)
            assert where is not None
            key = tuple((s.start, s.stop) for s in where)
            value = tensor.detach().numpy().tobytes()
            assert shards.setdefault(key, value) == value, name


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_branches_that_share_a_matrix_on_lanes(zero: int, schedule: str) -> None:
    """Four stages that are no chain: sums of ties that come late, accumulated over two batches."""
    made = data_parallel(hand_stages.branches, 2, zero, schedule=schedule, clip_norm=0.1)
    whole = hand_stages.Whole(hand_stages.branches(), torch.optim.AdamW, 0.1)
    for seed in range(3):
        for more in (0, 10):
            given = hand_stages.batch(16, seed=seed + more)
            loss = made.backward(given)
            assert_close(loss, whole.backward(given, 4))
            assert_close(made.gradients(), {n: p.grad for n, p in whole.named.items()})
        made.update()
        whole.update()
        assert made.last_grad_norm is not None and whole.norm is not None
        assert_close(made.last_grad_norm, whole.norm)
        assert_close({n: made.state_dict()[n] for n in whole.named}, whole.state())


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
def test_rows_that_do_not_divide_are_repeated(mesh: str) -> None:
    """The step is that of the seven rows."""
    made, whole = trainer(InProcess(ranks_of(mesh)), mesh), Whole()
    for rows in (7, 6, 1):
        assert_close(made.step(batch(rows)), whole.step(batch(rows)))
    assert_close(made.state_dict(), whole.state())


def test_a_smaller_batch_makes_fewer_and_larger_pieces() -> None:
    """Six rows on two mesh ranks are three pieces at most, of two rows each."""
    made = trainer(InProcess(4), "dp=2", microbatches=8)
    feed = made.parts.source.feed
    cut = feed.read(batch(6), 8)
    assert cut.rows == (2, 2, 2)
    assert [part.inputs[0]["ids"].shape for part in feed.parts(cut)] == [
        (1, 3),
        (1, 3),
    ]
    storage = cut.inputs[0]["ids"].untyped_storage().data_ptr()
    parts = feed.parts(cut)
    assert all(p.inputs[0]["ids"].untyped_storage().data_ptr() == storage for p in parts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("what", ["raise", "backward"])
@pytest.mark.parametrize(("stage", "mesh_ranks"), [(0, (1,)), (1, (0,)), (0, (0, 1))])
def test_in_process_a_failed_lane_is_named(
    mesh: str, what: str, stage: int, mesh_ranks: tuple[int, ...]
) -> None:
    """The mesh ranks that wait for it stop, one error names it, and the trainer can go on."""
    found = fail(mesh, stage, what, mesh_ranks)
    size = ranks_of(mesh) // 2
    named = {where.split(",")[0] for _, where, _ in found["problems"]}
    assert {code for code, *_ in found["problems"]} == {"FXP504"}
    assert named and named <= {f"rank {stage * size + mesh_rank}" for mesh_rank in mesh_ranks}
    assert all(f"stage {stage}, action {stage}" in where for _, where, _ in found["problems"])
    assert found["unchanged"] and found["gradients"] == 0
    assert found["next"] and found["seconds"] < 10


SAVED = [
    ("dp=2,tp=2", {}), ("tp=2", {}), ("dp=2", {"zero": 1}), ("tp=2,dp=2", {"zero3": True}),
    ("dp=2", {"zero": 2, "counts": (2, 1)}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), SAVED)
@pytest.mark.parametrize(("other", "more"), SAVED[:3])
def test_a_checkpoint_does_not_know_the_sharding(
    mesh: str, options: dict[str, Any], other: str, more: dict[str, Any]
) -> None:
    """Model and optimizer state go from any mesh to any other."""
    old = move(mesh, options, None)
    new = move(other, more, old["saved"])
    assert new["after"] == pytest.approx(old["after"], rel=1e-6)
    assert new["saved"] == old["saved"], "what was loaded is what was saved"


def test_a_wrong_shape_is_told_by_the_whole_tensor() -> None:
    made = trainer(InProcess(4), "tp=2")
    state = made.state_dict()
    assert state["up.weight"].shape == (10, 6)
    state["up.weight"] = torch.zeros(5, 6)
    with pytest.raises(FxpartError, match=r"\(5, 6\), not \(10, 6\)"):
        made.load_state_dict(state)


def test_learning_rate_schedules_change_all_lanes() -> None:
    made, whole = trainer(InProcess(4), "tp=2"), Whole()
    assert made.optimizer is not None
    one = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
    two = torch.optim.lr_scheduler.StepLR(whole.optimizer, 1, 0.5)
    for seed in range(3):
        made.step(batch(seed=seed))
        whole.step(batch(seed=seed))
        one.step()
        two.step()
    assert_close(made.state_dict(), whole.state())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_gloo_trains_like_one_process(pool: Pool, mesh: str) -> None:
    for found in pool.run(train, mesh, {}, ranks=4):
        for mine, expected in zip(found, one_process(), strict=True):
            assert_close(mine, expected)


@pytest.mark.slow
def test_gloo_moves_state_between_meshes(pool: Pool) -> None:
    old = pool.run(move, "dp=2", {"zero": 1}, None, ranks=4)
    assert [found == old[0] for found in old] == [True] * 4
    new = pool.run(move, "tp=2", {}, old[0]["saved"], ranks=4)
    assert all(found["after"] == pytest.approx(old[0]["after"], rel=1e-6) for found in new)
    first, *others = pool.run(move, "tp=2", {}, old[0]["saved"], True, ranks=4)
    assert first["saved"] == new[0]["saved"]
    assert all(found["saved"]["model"] == {} for found in others)


@pytest.mark.slow
def test_gloo_refuses_rows_on_every_rank(pool: Pool) -> None:
    found = pool.run(refuse, "dp=2", 0, ranks=4)
    assert found == [refuse("dp=2", 0)] * 4
    assert {problem[0] for problem in refuse("dp=2", 0)} == {"FXP105"}


@pytest.mark.slow
def test_gloo_a_failure_on_every_lane_is_clean(pool: Pool) -> None:
    """All mesh ranks of a stage fail at one action: the same error everywhere, and all go on."""
    found = pool.run(fail, "tp=2", 0, "raise", (0, 1), ranks=4)
    assert all(each["problems"] == found[0]["problems"] for each in found)
    assert {where.split(",")[0] for _, where, _ in found[0]["problems"]} == {"rank 0", "rank 1"}
    assert all(each["unchanged"] and each["next"] for each in found)


@pytest.mark.slow
def test_gloo_a_failure_on_one_lane_ends_within_the_timeout(pool: Pool) -> None:
    """The other mesh rank waits in a collective that never comes: bounded, and the job is over."""
    found = pool.run(fail, "tp=2", 0, "raise", (0,), 3.0, ranks=4)
    assert all(each["problems"][0][0] in ("FXP503", "FXP504") for each in found)
    assert all(each["seconds"] < 12 for each in found)
    assert all("again" in each for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "other", "more"),
    [("tp=2", {}, "dp=2", {"zero": 1}), ("dp=2", {"zero3": True}, "tp=2", {})],
)
def test_gloo_parts_go_through_a_distributed_checkpoint(
    pool: Pool,
    tmp_path: Path,
    mesh: str,
    options: dict[str, Any],
    other: str,
    more: dict[str, Any],
) -> None:
    """Each rank gives DTensors of its own stage; another sharding reads the same numbers."""
    found = pool.run(checkpoint, str(tmp_path), mesh, options, other, more, ranks=4)
    whole = weights()
    for rank, each in enumerate(found):
        assert each["same"] and each["moved"]
        assert ("scale" in each["names"]) == (rank >= 2)
        assert "embed.weight" in each["names"], "the stage that has a copy of a tie gives it, too"
        assert each["shapes"] == {n: list(whole[n].shape) for n in each["names"]}
    assert found[0]["local"]["up.weight"] == [5, 6]


def test_in_process_there_are_no_dtensors() -> None:
    with pytest.raises(FxpartError, match="sharded over processes"):
        trainer(InProcess(4), "tp=2").state_dict(sharded=True)
