"""Wishes in words: what they read as, and that a choice which keeps them is what is left."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_problems import random_problem

from fxpart.errors import FxpartError
from fxpart.solver.joint.constraints.apply import apply_constraints
from fxpart.solver.joint.constraints.block_names import find_layer_blocks, match_blocks
from fxpart.solver.joint.constraints.megatron_layout import compute_layout_starts, expand_layout
from fxpart.solver.joint.constraints.parse import parse_constraint, parse_constraints
from fxpart.solver.joint.objective import degrees, evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem

GPT = (
    "transformer.wte", "transformer.wpe",
    *(f"transformer.h.{i}.{part}" for i in range(4) for part in ("attn", "mlp")),
    "lm_head", "cross_entropy_loss",
)  # fmt: skip


def choices(problem: JointProblem) -> list[JointChoice]:
    """Every choice of a small problem with one piece a stage, faulty ones too."""
    n, found = len(problem.blocks), []
    for count in range(1, min(3, n) + 1):
        for cuts, options in product(
            combinations(range(1, n), count - 1),
            product(range(len(problem.options)), repeat=count),
        ):
            found += [
                JointChoice(microbatches=m, schedule=s, starts=(0, *cuts), options=options)
                for m in problem.microbatches
                for s in problem.schedules
            ]
    return found


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("h.0-1", (2, 3, 4, 5)),
        ("transformer.h.3", (8, 9)),
        ("h.2.mlp", (7,)),
        ("lm_head", (10,)),
        ("wte", (0,)),
        ("#0-1", (0, 1)),
        ("#11", (11,)),
        ("transformer", tuple(range(10))),
    ],
)
def test_blocks_by_name(pattern: str, blocks: tuple[int, ...]) -> None:
    assert match_blocks(GPT, pattern) == blocks


@pytest.mark.parametrize("pattern", ["h.9", "5-9", "mlp.0", "", "#12", "#a-b", "h.0-1.wte"])
def test_a_name_that_no_block_has(pattern: str) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        match_blocks(GPT, pattern)


def test_layers_are_the_longest_numbered_stack() -> None:
    assert find_layer_blocks(GPT) == ((2, 3), (4, 5), (6, 7), (8, 9))
    assert find_layer_blocks(("a", "b")) == ()
    two = ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")
    assert find_layer_blocks(two) == ((2, 2), (3, 3), (4, 4))
    assert find_layer_blocks(("towers.0.x", "other", "towers.0.y")) == ()  # a layer in two places


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*2,m|L", ("Ettt", "tt", "tt", "m", "L")),
        ("Ett|tt L".replace(" ", ""), ("Ett", "ttL")),
        ("E|t*2|((t|)*2)*2tL", ("E", "tt", "t", "t", "t", "t", "tL")),
        ("tttt", ("tttt",)),
    ],
)
def test_megatrons_notation(text: str, stages: tuple[str, ...]) -> None:
    assert expand_layout(text) == stages


def test_megatrons_layout_as_first_blocks() -> None:
    assert compute_layout_starts("Et|t*2|tL", GPT) == (0, 4, 8)
    assert compute_layout_starts("E|tttt|L", GPT) == (0, 2, 10)
    assert compute_layout_starts("tttt", GPT) == (0,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "E|",
        "tE",
        "Lt",
        "Ettt|tq",
        "(tt",
        "tt)",
        "t*99999999",
        "((t*999)*999)*999",
        "ttt",
        "E|L",
    ],
)
def test_a_layout_that_cannot_be(text: str) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        compute_layout_starts(text, GPT)


@pytest.mark.slow
@given(st.text(alphabet="EtmL|*()0123456789, ", max_size=30))
def test_any_text_is_a_layout_or_one_clear_error(text: str) -> None:
    try:
        starts = compute_layout_starts(text, GPT)
    except FxpartError as fault:
        assert fault.code == "FXP109"
    else:
        assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(GPT)


def test_wishes_among_constraints() -> None:
    wishes = parse_constraints(
        {"tp": 2, "stages": "2,3", "forbid": "recompute; zero=3", "stage": "h.0=0;h.3=-1",
         "time_limit": 3.0}
    )  # fmt: skip
    assert [str(w) for w in wishes] == [
        "forbid recompute", "forbid zero=3", "stage h.0=0", "stage h.3=-1", "fix pp=2,3",
        "fix tp=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fix", "tp"), ("fix", "tp="), ("fix", "tp=two"), ("fix", "tp=0"), ("fix", "speed=9"),
        ("fix", "schedule=fast"), ("fix", "recompute=some"), ("forbid", "microbatches"),
        ("forbid", "colour"), ("forbid", "cut"), ("stage", "h.0"), ("stage", "=1"),
        ("stage", "h.0=first"), ("fix", "dp=1²"), ("fix", "zero=-1"),
    ],
)  # fmt: skip
def test_a_wish_that_says_nothing(kind: str, text: str) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        parse_constraint(kind, text)  # type: ignore[arg-type]


FORBID = ["forbid recompute", "forbid tp", "forbid zero", "forbid dp=2", "forbid cut=#0"]
WISHES = [*FORBID, "fix tp=1", "fix dp=1,2", "fix recompute=none", "fix pp=2", "stage #0=0",
          "stage #1=-1", "fix microbatches=2", "forbid pp"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", WISHES)
def test_exactly_the_choices_that_keep_a_wish_are_left(text: str) -> None:
    """Against a filter over all choices that knows nothing of how wishes are applied."""
    kind, _, body = text.partition(" ")
    wish, seen = parse_constraint(kind, body), 0  # type: ignore[arg-type]
    for seed in range(12):
        problem = random_problem(seed)
        if len(problem.options) > 4 or len(problem.blocks) > 5:
            continue
        kept = sorted(
            evaluate(problem, c).seconds
            for c in choices(problem)
            if evaluate(problem, c).feasible and keeps(problem, c, text)
        )
        try:
            limited = apply_constraints(problem, [wish])
        except FxpartError as fault:
            assert fault.code == "FXP202" and not kept
            continue
        found = sorted(e.seconds for c in choices(limited) if (e := evaluate(limited, c)).feasible)
        assert found == kept
        seen += len(found)
    assert seen


def keeps(problem: JointProblem, choice: JointChoice, text: str) -> bool:
    """Whether a choice of one piece a stage keeps one of WISHES, by its words alone."""
    count = len(choice.options)
    named = {
        "dp": [degrees(problem, o)[0] for o in choice.options],
        "tp": [degrees(problem, o)[1] for o in choice.options],
        "zero": [degrees(problem, o)[3] for o in choice.options],
        "recompute": [degrees(problem, o)[4] for o in choice.options],
        "pp": [count], "microbatches": [choice.microbatches],
    }  # fmt: skip
    kind, _, body = text.partition(" ")
    key, _, value = body.partition("=")
    if kind == "stage":
        block = int(key[1:])
        return sum(s <= block for s in choice.starts) - 1 == int(value) % count
    if key == "cut":
        return 1 not in choice.starts
    if kind == "fix":
        return all(str(v) in value.split(",") for v in named[key])
    bad = value.split(",") if value else None
    usual = {"recompute": "none", "zero": "0"}.get(key, "1")
    return all((str(v) not in bad) if bad else (str(v) == usual) for v in named[key])
