"""Sums between mesh ranks that start in the last backward: the same numbers, one order, no one
left."""

from __future__ import annotations

import threading
from typing import Any

import overlap_programs as programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_programs import assert_close, one_process
from ranks import Pool
from torch import nn

from fxpart.collectives import Communicator, InProcessHub
from fxpart.errors import FxpartError
from fxpart.runtime.gradients import buckets as terms
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.gradients.buckets import PartialGradient, make_buckets
from fxpart.runtime.gradients.reducer import ReductionQueue, StageGradientReducer
from fxpart.sharding import Mesh

CLIPPED = {"clip_norm": 0.5}
KINDS = [("dp=2", 0), ("dp=3", 1), ("dp=2,tp=2", 0), ("tp=2,dp=2", 1), ("dp=2", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), KINDS)
@pytest.mark.parametrize("calls", [1, 2])
def test_early_sums_are_the_late_ones(mesh: str, zero: int, calls: int) -> None:
    """Every bit, clipping, accumulation over calls and a smaller last batch included."""
    options = {**CLIPPED, "zero": zero}
    early = programs.train(mesh, options, calls=calls)
    late = programs.train(mesh, options, calls=calls, early=False)
    assert early == late
    if calls == 1:
        assert_close(early["numbers"], one_process()[-1]["state"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 150, 1 << 20])
@pytest.mark.parametrize("room", [1, 4])
def test_neither_size_nor_number_of_buckets_changes_a_bit(size: int, room: int) -> None:
    options = {"zero": 1}
    found = programs.train("dp=2", options, size=size, room=room)
    assert found == programs.train("dp=2", options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_lanes_start_the_same_buckets_in_the_same_order(schedule: str) -> None:
    """The first step learns how often gradients come; from then on they go in the backward."""
    first, *others = programs.order("dp=2", {"schedule": schedule}, 100)
    wanted = [[(6,)], [(6, 10)], [(10,)], [(10, 6)], []]  # reverse order of use, then the flags
    for step in (first, *others):
        for mesh_rank in (0, 1):
            assert [names for at, _, names in step[0] if at == mesh_rank] == wanted
    assert not any(armed for _, armed, _ in first[0])
    for step in others:
        assert [armed for mesh_rank, armed, _ in step[0] if mesh_rank == 0] == [True] * 4 + [False]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", "backward"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("mesh_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("zero", [0, 1])
def test_after_a_failure_nothing_is_left_under_way(
    what: str, at: int, mesh_ranks: tuple[int, ...], zero: int
) -> None:
    found = programs.fail("dp=2", {"zero": zero}, what, at, mesh_ranks)
    assert {code for code, *_ in found["problems"]} == {"FXP504"}
    assert found["unchanged"] and not found["left"] and found["seconds"] < 10
    assert found["state"] == programs.good("dp=2", {"zero": zero})


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_some_lanes_have_not(zero: int) -> None:
    """It counts as zeros there; one that no mesh rank has stays away, and the optimizer at rest."""
    none = programs.absent("dp=2", (0, 1), zero)
    assert none["gradients"] == ["embed.weight", "scale"]
    start = {n: t.tolist() for n, t in programs.make("dp=2", {}, 100).state_dict().items()}
    still = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert all(none["state"][name] == start[name] for name in still)
    some = programs.absent("dp=2", (0,), zero)
    assert len(some["gradients"]) == 6
    assert all(some["state"][name] != start[name] for name in still)


# -- one stage alone ---------------------------------------------------------------------------


def stage(comm: Communicator, sizes: list[int]) -> tuple[list[nn.Parameter], StageGradientReducer]:
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    made = [PartialGradient(p, p, ("dp",), "", p.nbytes) for p in parameters]
    return parameters, StageGradientReducer(comm, make_buckets(made), ReductionQueue())


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_lanes_whose_gradients_come_in_other_orders(data: st.DataObject) -> None:
    """Whatever the order on each mesh rank, sums meet their like; counted over several steps."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    uses = [[data.draw(st.permutations(range(len(sizes)))) for _ in range(3)] for _ in range(2)]
    skipped = data.draw(st.sets(st.integers(0, len(sizes) - 1)))

    def mesh_rank(comm: Communicator) -> None:
        parameters, made = stage(comm, sizes)
        for step, order in enumerate(uses[comm.mesh_rank]):
            if step:
                made.arm()
            total = torch.zeros(())
            for index in order:
                if index not in skipped:
                    total = total + (parameters[index] * (comm.mesh_rank + index + step)).sum()
            if total.requires_grad:
                total.backward()
            if step:
                made.rest()
            made.finish()
            for index, parameter in enumerate(parameters):
                if index in skipped:
                    assert parameter.grad is None
                else:
                    assert parameter.grad is not None
                    assert (parameter.grad == 2 * (index + step) + 1).all()
                parameter.grad = None

    before, reduce_scatter.BUCKET, terms.FIRST = (reduce_scatter.BUCKET, terms.FIRST), 24, 12
    try:
        InProcessHub(Mesh.parse("dp=2"), timeout=20).run(mesh_rank)
    finally:
        reduce_scatter.BUCKET, terms.FIRST = before


def test_a_gradient_that_grows_after_its_sum_has_begun_is_an_error() -> None:
    """It cannot happen with one backward for each action; it must not pass unseen if it does."""

    def mesh_rank(comm: Communicator) -> str:
        (parameter, other), made = stage(comm, [600_000, 3])
        for _ in range(2):
            made.arm()
            (parameter.sum() + other.sum()).backward()
            made.rest()
            made.finish()
        made.arm()
        parameter.sum().backward()
        with pytest.raises(FxpartError, match="after its reduction had started"):
            parameter.sum().backward()
        return "told"

    assert InProcessHub(Mesh.parse("dp=2"), timeout=20).run(mesh_rank) == ["told"] * 2


def test_a_gradient_that_comes_in_two_parts_waits_for_both() -> None:
    def mesh_rank(comm: Communicator) -> list[float]:
        (parameter, _), made = stage(comm, [600_000, 3])
        seen = []
        for _ in range(3):
            made.arm()
            parameter.sum().backward()
            seen.append(float(made._next))
            parameter.sum().backward()
            seen.append(float(made._next))
            made.rest()
            made.finish()
            assert parameter.grad is not None
            seen.append(float(parameter.grad[0]))
            parameter.grad = None
        return seen

    found = InProcessHub(Mesh.parse("dp=2"), timeout=20).run(mesh_rank)
    assert found == [[0, 0, 4, 0, 1, 4, 0, 1, 4]] * 2


def test_sums_keep_the_layout_of_gradients() -> None:
    """A gradient in channels-last order stays so: norms add numbers up as they lie."""

    def mesh_rank(comm: Communicator) -> Any:
        weight = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
        bias = nn.Parameter(torch.ones(4))
        made = StageGradientReducer(
            comm,
            make_buckets([PartialGradient(p, p, ("dp",), "", p.nbytes) for p in (weight, bias)]),
            ReductionQueue(),
        )
        whole = torch.arange(48.0).view(4, 3, 2, 2)
        ((weight * whole).sum() + bias.sum()).backward()
        assert weight.grad is not None
        before = weight.grad.stride()
        made.finish()
        assert torch.equal(weight.grad, 2 * whole)
        return before == weight.grad.stride()

    assert all(InProcessHub(Mesh.parse("dp=2"), timeout=20).run(mesh_rank))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_buckets_hold_each_gradient_once_in_order(data: st.DataObject) -> None:
    kinds = data.draw(
        st.lists(
            st.tuples(
                st.integers(1, 40),
                st.sampled_from([("dp",), ("dp", "tp")]),
                st.booleans(),
                st.sampled_from([torch.float32, torch.bfloat16]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    made = []
    for size, axes, cut, dtype in kinds:
        parameter = torch.empty(size, dtype=dtype)
        made.append(PartialGradient(parameter, parameter, axes, "dp" * cut, parameter.nbytes))
    before, reduce_scatter.BUCKET, terms.FIRST = (reduce_scatter.BUCKET, terms.FIRST), 100, 20
    try:
        found = make_buckets(made)
    finally:
        reduce_scatter.BUCKET, terms.FIRST = before
    flat = [term for bucket in found for term in bucket.terms]
    assert sorted(map(id, flat)) == sorted(map(id, made))
    assert all(b.bytes <= 100 or len(b.terms) == 1 for b in found)
    assert all(len({(t.axes, t.scattered, t.parameter.dtype) for t in b.terms}) <= 1 for b in found)
    places = {id(term): at for at, term in enumerate(made)}
    for bucket in found:
        assert [places[id(t)] for t in bucket.terms] == sorted(places[id(t)] for t in bucket.terms)
    told = [term for bucket in found for term in bucket.flags]
    assert sorted(map(id, told)) == sorted(map(id, made)), "each is told of once"
    assert all(not b.scattered and {t.axes for t in b.flags} == {b.axes} for b in found if b.flags)


# -- real ranks --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 0), ("dp=2", 1)])
def test_gloo_early_sums_are_those_of_one_process(pool: Pool, mesh: str, zero: int) -> None:
    options = {**CLIPPED, "zero": zero}
    expected = programs.train(mesh, options, calls=2)
    assert pool.run(programs.train, mesh, options, ranks=4) == [programs.train(mesh, options)] * 4
    for found in pool.run(train_accumulating, mesh, options, ranks=4):
        assert found == expected


def train_accumulating(mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two batches an update, one bucket under way."""
    return programs.train(mesh, options, calls=2, room=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at", "mesh_ranks"),
    [("raise", 1, (0,)), ("backward", 2, (1,)), ("backward", 1, (0, 1))],
)
def test_gloo_a_failure_leaves_no_bucket_behind(
    pool: Pool, what: str, at: int, mesh_ranks: tuple[int, ...]
) -> None:
    """The other mesh ranks' sums end with zeros; the next steps are those without the failed
    one."""
    expected = programs.good("dp=2", {})
    results = pool.run(programs.fail, "dp=2", {}, what, at, mesh_ranks, ranks=4)
    assert len({str(found["problems"]) for found in results}) == 1
    for found in results:
        assert {code for code, *_ in found["problems"]} == {"FXP504"}
        assert found["unchanged"] and not found["left"] and found["seconds"] < 15
        assert found["state"] == expected


@pytest.mark.slow
def test_gloo_a_gradient_that_some_lanes_have_not(pool: Pool) -> None:
    expected = programs.absent("dp=2", (0,), 0)
    assert pool.run(programs.absent, "dp=2", (0,), 0, ranks=4) == [expected] * 4


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    made = programs.make("dp=2", {}, 100)
    made.step(programs.batch(12))
    made.close()
    assert threading.active_count() <= before
