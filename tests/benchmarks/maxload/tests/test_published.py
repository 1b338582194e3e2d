"""The eight published instances, by both solvers; the files are not in the project."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from benchmarks.maxload.formats import read_instance
from benchmarks.maxload.instance import Instance, MaxLoadAnswer, evaluate, faults
from benchmarks.maxload.portfolio import solve

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "bench" / "maxload"
CHAIN = {
    "layer_bert24_inference": 17.7899,
    "layer_bert24_training": 41.7458,
    "layer_resnet50_inference": 33.7747,
    "layer_gnmt_inference": 32.9107,
    "op_bert_l-3_inference": 27.9186,
    "op_bert_l-3_training": 65.3031,
    "op_bert_l-6_inference": 29.5795,
    "op_resnet50_inference": 124.3488,
}
CLOSED_ANY = {
    "layer_bert24_training": 39.7895,
    "layer_gnmt_inference": 31.6873,
    "op_bert_l-3_inference": 21.9084,
    "op_bert_l-3_training": 54.2074,
    "op_resnet50_inference": 124.3488,
}
OPEN_ANY = {
    "layer_bert24_inference": 15.1485,
    "layer_resnet50_inference": 33.0246,
    "op_bert_l-6_inference": 25.4516,
}
SECONDS = {("op_bert_l-3_training", "cp-sat"), ("op_resnet50_inference", "cp-sat")}
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/bench/maxload is not there")


def instance(name: str) -> Instance:
    return read_instance(FOLDER / f"{name}.json")


def valid(one: Instance, found: MaxLoadAnswer, mode: str) -> bool:
    assert found.assignment is not None
    assert faults(one, found.assignment, mode) == []  # type: ignore[arg-type]
    return found.objective == evaluate(one, found.assignment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,solver",
    [
        pytest.param(name, solver, marks=[pytest.mark.slow] * ((name, solver) in SECONDS))
        for name in CHAIN
        for solver in ("dp", "cp-sat")
    ],
)
def test_the_best_chain_is_found_and_proven(name: str, solver: str) -> None:
    one = instance(name)
    found = solve(one, solver=solver, time_limit=280)
    assert valid(one, found, "chain")
    assert found.status == "optimal"
    assert found.objective == pytest.approx(CHAIN[name], abs=6e-5)
    assert found.lower_bound >= found.objective * (1 - 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED_ANY)
def test_the_best_of_all_assignments_is_found_and_proven(name: str) -> None:
    one = instance(name)
    found = solve(one, mode="any", time_limit=280)
    assert valid(one, found, "any")
    assert found.status == "optimal"
    assert found.objective == pytest.approx(CLOSED_ANY[name], abs=6e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN_ANY)
def test_any_is_never_worse_than_a_chain(name: str) -> None:
    one = instance(name)
    found = solve(one, mode="any", time_limit=5)
    assert valid(one, found, "any")
    assert found.objective <= CHAIN[name] + 6e-5
    assert OPEN_ANY[name] - 6e-5 <= found.lower_bound <= found.objective


def test_equal_runs_give_equal_bytes() -> None:
    one = instance("op_bert_l-3_inference")
    assert len({msgspec.json.encode(solve(one)) for _ in range(2)}) == 1
