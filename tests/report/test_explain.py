"""The text of a plan: what it must say, whatever the plan."""

from __future__ import annotations

import msgspec
import pytest
import sample_plans
from hypothesis import given, settings

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.report.explanation_builder import balance
from fxpart.report.explanation_text import certificate, explain
from fxpart.report.table import shortened, table


def test_every_part_is_told() -> None:
    text = explain(sample_plans.plan(slow=2.0))
    for words in (
        "GPT2LMHeadModel on local:4: 4 stages on 4 ranks, schedule 1f1b",
        "input_ids int64[s0*, 64]",
        "16 samples in 8 microbatches",
        "transformer.h.0 … transformer.h.1",
        "Stage 3 is the bottleneck: 61.0 ms per microbatch, balance (max/mean) 1.59",
        "within the requested gap of the optimum; objective",
        "does not fit",
        "transformer.wte.weight = lm_head.weight: stage 0 owns it, copies on 3",
        "analytic roofline",
        "stages  4",
    ):
        assert words in text, words


def test_each_rank_has_its_memory() -> None:
    plan = sample_plans.plan()
    lines = explain(plan).splitlines()
    start = lines.index("Peak memory by rank") + 2
    for line, entry in zip(lines[start : start + 4], plan.prediction.ranks, strict=True):
        assert units.size(entry.memory.total) in line and units.size(entry.memory_limit) in line


@pytest.mark.parametrize(
    ("status", "bound", "word"),
    [
        ("optimal", 2.0, "optimal; objective 2.00 s, lower bound 2.00 s, gap 0.0 %"),
        ("within gap", 1.9, "objective 2.00 s, lower bound 1.90 s, gap 5.0 %"),
        ("best found", 1.0, "best found within the time limit; objective 2.00 s"),
    ],
)
def test_certificate_in_words(status: str, bound: float, word: str) -> None:
    plan = sample_plans.plan()
    given_ = msgspec.structs.replace(
        plan.certificate,
        status=status,
        objective=2.0,
        lower_bound=bound,
        gap=(2.0 - bound) / 2.0,
    )
    assert word in certificate(msgspec.structs.replace(plan, certificate=given_))[0]


@pytest.mark.slow
@given(sample_plans.plans())
@settings(max_examples=50, deadline=None)
def test_any_valid_plan_can_be_told(plan: Plan) -> None:
    text = explain(plan)
    assert text.endswith("\n") and "Certificate" in text
    assert all(len(line) < 240 for line in text.splitlines())


def test_balance_of_equal_stages_is_one() -> None:
    plan = sample_plans.plan(3)
    ranks = tuple(msgspec.structs.replace(r, transfer_seconds=0.0) for r in plan.prediction.ranks)
    prediction = msgspec.structs.replace(plan.prediction, ranks=ranks)
    assert balance(msgspec.structs.replace(plan, prediction=prediction)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 s"), (1.5e-7, "150 ns"), (0.01234, "12.3 ms"), (2.0, "2.00 s"), (1234.5, "1234 s"),
     (1e-12, "1.0e-12 s")],
)  # fmt: skip
def test_seconds(value: float, words: str) -> None:
    assert units.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (24 << 30, "24.0 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(value: int, words: str) -> None:
    assert units.size(value) == words


def test_counts_and_shares() -> None:
    assert [units.count(n) for n in (999, 124_000_000, 175_000_000_000)] == [
        "999",
        "124 M",
        "175 G",
    ]
    assert [units.percent(x) for x in (0, 1e-5, 0.123, 1)] == [
        "0.0 %", "under 0.05 %", "12.3 %", "100.0 %",
    ]  # fmt: skip


def test_table_and_shortening() -> None:
    assert table(("a", "bb"), "<>", [("xyz", "1"), ("u", "10")]) == [
        "a    bb",
        "xyz   1",
        "u    10",
    ]
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert shortened("a\n\tb", 9) == "a b"
    assert all(len(shortened("x" * n, 7)) <= 7 for n in range(20))
