"""Optimizers that a user gives, on several processes: as in one process, or refused on all."""

from __future__ import annotations

import optimizer_programs
import pytest
from ranks import Pool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["stages", "replicas", "zero1", "zero3", "tensor"])
def test_an_instance_and_its_scheduler(pool: Pool, layout: str) -> None:
    found = pool.run(optimizer_programs.instance, layout, ranks=2, timeout=120.0)
    assert all(each < 2e-6 for each in found)


@pytest.mark.parametrize("kind", ["norm", "estimate"])
@pytest.mark.parametrize(
    ("layout", "code"), [("replicas", ""), ("stages", "FXP115"), ("zero1", "FXP109")]
)
def test_an_update_of_all_parameters(pool: Pool, kind: str, layout: str, code: str) -> None:
    found = pool.run(optimizer_programs.whole_update, layout, kind, ranks=2, timeout=120.0)
    if code:
        assert found == [code] * 2
    else:
        assert all(each < 2e-5 for each in found)


@pytest.mark.parametrize("layout", ["stages", "replicas", "zero1"])
def test_weights_are_clamped_on_every_rank(pool: Pool, layout: str) -> None:
    found = pool.run(optimizer_programs.clamped, layout, ranks=2, timeout=120.0)
    assert all(each < 1e-6 for each in found)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("options at first", "FXP501"),
        ("options", "FXP501"),
        ("shown options", "FXP501"),
        ("frozen", "FXP501"),
        ("written", "FXP113"),
        ("nothing", "trained"),
    ],
)
def test_ranks_that_differ_hear_of_it(pool: Pool, what: str, code: str) -> None:
    assert pool.run(optimizer_programs.apart, what, ranks=2, timeout=60.0) == [code] * 2


def test_states_that_differ_are_refused(pool: Pool) -> None:
    assert pool.run(optimizer_programs.state_apart, ranks=2, timeout=60.0) == ["FXP501"] * 2


def test_a_rank_without_anything_for_the_optimizer(pool: Pool) -> None:
    found = pool.run(optimizer_programs.muon_of_some, ranks=3, timeout=120.0)
    assert found[0] == found[1] == found[2] == optimizer_programs.muon_of_some()


def test_a_function_that_raises_on_one_rank_ends_all(pool: Pool) -> None:
    found = pool.run(optimizer_programs.raises_on_one, ranks=2, timeout=60.0)
    assert found == ["FXP115 True"] * 2
