"""Problems as JSON: the same back, the same answer, and only our errors for broken files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_problems import random_problem, transformer

from fxpart.errors import FxpartError
from fxpart.solver.archive import decode, encode, read, save_problem
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.validate import check_problem


def decoded(data: bytes | str, where: str = "problem") -> PartitionProblem:
    """The partition problem in a file."""
    return decode(data, PartitionProblem, check_problem, where)


@settings(max_examples=50, deadline=None)
@given(st.integers(min_value=0, max_value=2**40))
def test_round_trip(seed: int) -> None:
    problem = random_problem(seed)
    data = encode(problem)
    assert decoded(data) == problem
    assert encode(decoded(data)) == data


def test_replay_gives_the_same_answer(tmp_path: Path) -> None:
    for problem in (random_problem(2), transformer(layers=4, hidden=256, devices=4, noise=0.1)):
        save_problem(problem, tmp_path / "problem.json")
        assert solve(decoded(read(tmp_path / "problem.json"))) == solve(problem)


def test_every_fault_is_told() -> None:
    problem = transformer(layers=1, hidden=64, devices=2, sizes=(1,))
    one = msgspec.structs.replace(
        problem.variants[0], activation=(1,), workspace=(-1,) * 5, microbatches=0
    )
    broken = msgspec.structs.replace(
        problem, variants=(one,), max_stages=3, no_cut_after=(5,), step=((float("nan"),) * 5,)
    )
    with pytest.raises(FxpartError) as caught:
        check_problem(broken)
    wheres = [p.where for p in caught.value.problems]
    assert wheres == [
        "min_stages, max_stages",
        "no_cut_after",
        "variants[0]",
        "variants[0].activation",
        "variants[0].workspace",
        "step[0]",
    ]
    assert {p.code for p in caught.value.problems} == {"FXP206"}


VALUES = (None, -1, 0, 1, 2**70, -0.5, 1e300, 10**400, "x", [], {}, [[]], True, [0, 0], [9, 1])


def mutate(data: object, r: random.Random) -> object:
    """The data with one place in it replaced, removed or doubled."""
    if isinstance(data, dict) and data and r.random() < 0.95:
        key = r.choice(sorted(data))
        kind = r.random()
        if kind < 0.05:
            return {k: v for k, v in data.items() if k != key}
        if kind < 0.1:
            return {**data, "extra": 1}
        return {**data, key: mutate(data[key], r)}
    if isinstance(data, list) and data and r.random() < 0.9:
        place = r.randrange(len(data))
        kind = r.random()
        if kind < 0.1:
            return data[:place] + data[place + 1 :]
        if kind < 0.2:
            return [*data, data[place]]
        return [mutate(x, r) if i == place else x for i, x in enumerate(data)]
    return r.choice(VALUES)


def check_broken(start: int, count: int) -> int:
    refused = 0
    for seed in range(start, start + count):
        r = random.Random(seed)
        data = mutate(json.loads(encode(random_problem(seed % 50, 4))), r)
        try:
            problem = decoded(json.dumps(data))
        except FxpartError as failure:
            assert {p.code for p in failure.problems} == {"FXP206"}
            refused += 1
        else:
            assert solve(problem).status in ("optimal", "infeasible")
    return refused


def test_broken_problems_raise_our_errors_only() -> None:
    assert check_broken(0, 150) > 75


@pytest.mark.parametrize("name", ["zigzag", "zb-v"])
def test_schedule_without_a_closed_form(name: str) -> None:
    data = json.loads(encode(random_problem(1, 4))) | {"schedules": [name]}
    with pytest.raises(FxpartError, match=name) as caught:
        decoded(json.dumps(data))
    assert [(p.code, p.where) for p in caught.value.problems] == [("FXP206", "schedules")]


@pytest.mark.slow
def test_two_thousand_broken_problems() -> None:
    assert check_broken(1000, 2000) > 1000


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_other_files(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(FxpartError) as caught:
        decoded(read(tmp_path / "x.json"), str(tmp_path / "x.json"))
    assert caught.value.code == "FXP206"
    assert "x.json" in caught.value.problems[0].where


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(FxpartError) as caught:
        read(tmp_path / "absent.json")
    assert caught.value.code == "FXP206"
    with pytest.raises(FxpartError) as caught:
        save_problem(random_problem(0), tmp_path / "absent" / "x.json")
    assert caught.value.code == "FXP603"
