"""What each action needs, spelled out by hand, and the engine of earliest times."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from random_schedules import Case, cases

from fxpart.errors import FxpartError
from fxpart.schedule.action import Action, ActionKind, StageEdge, parse
from fxpart.schedule.builders import one_f_one_b
from fxpart.schedule.dependence import Dependence, chain, get_transfer_partner, get_transfer_send
from fxpart.schedule.event_times import compute_earliest_times
from fxpart.schedule.lower import lower

# Stage 0 feeds 1, 2 and 3; stages 0 and 2 share rank 0; nothing comes back from 1 to 0.
EDGES = (
    StageEdge(0, 1, backward=False),
    StageEdge(0, 2),
    StageEdge(0, 3),
    StageEdge(1, 3),
    StageEdge(2, 3),
)
GRAPH = Dependence.build((0, 1, 0, 1), EDGES)


@pytest.mark.parametrize(
    ("action", "computes", "requires"),
    [
        ("0F4", "", ""),
        ("1F4", "0F4", "1RECV_F4"),
        ("2F4", "0F4", "0F4"),
        ("3F4", "0F4 1F4 2F4", "3RECV_F4>0 1F4 3RECV_F4"),
        ("3B4", "3F4", "3F4"),
        ("2B4", "2F4 3B4", "2F4 2RECV_B4"),
        ("1B4", "1F4 3B4", "1F4 3B4"),
        ("0B4", "0F4 2B4 3B4", "0F4 2B4 0RECV_B4>3"),
        ("0W4", "0I4", "0I4"),
    ],
)
def test_computations(action: str, computes: str, requires: str) -> None:
    assert [str(a) for a in GRAPH.computes(parse(action))] == computes.split()
    assert [str(a) for a in GRAPH.requires(parse(action))] == requires.split()


@pytest.mark.parametrize(
    ("action", "pairs"),
    [
        ("0F4", "0SEND_F4 1RECV_F4 0SEND_F4>3 3RECV_F4>0"),
        ("1F4", ""),
        ("2F4", "2SEND_F4 3RECV_F4"),
        ("3B4", "3SEND_B4>0 0RECV_B4>3 3SEND_B4 2RECV_B4"),
        ("1B4", ""),
        ("2B4", ""),
        ("0B4", ""),
        ("3W4", ""),
    ],
)
def test_transfers(action: str, pairs: str) -> None:
    assert [str(a) for pair in GRAPH.transfers(parse(action)) for a in pair] == pairs.split()


def test_transfers_require_what_makes_them() -> None:
    for text, needs in (
        ("0SEND_F4>3", "0F4"), ("3RECV_F4>0", "0SEND_F4>3"),
        ("3SEND_B4>0", "3B4"), ("0RECV_B4>3", "3SEND_B4>0"),
    ):  # fmt: skip
        assert [str(a) for a in GRAPH.requires(parse(text))] == [needs]


def test_split_backwards_send_from_their_first_half() -> None:
    split = Dependence.build((0, 1), chain(2), split=frozenset({(1, 0)}))
    assert str(split.backward(1, 0)) == "1I0"
    assert str(split.backward(1, 1)) == "1B1"
    assert [str(a) for a in split.computes(parse("0B0"))] == ["0F0", "1I0"]
    assert [str(a) for a in split.requires(parse("1SEND_B0"))] == ["1I0"]
    assert [str(a) for a in split.requires(parse("1SEND_B1"))] == ["1B1"]
    assert split.transfers(parse("1W0")) == ()


def test_evaluation_has_no_gradients() -> None:
    evaluated = Dependence.build((0, 1), chain(2), trains=False)
    assert evaluated.gradient_consumers == ((), ())
    assert evaluated.consumers == ((1,), ())


@given(cases())
@settings(max_examples=60, deadline=None)
def test_partners(case: Case) -> None:
    """A transfer and its partner are each other's, and name one send."""
    for actions in lower(case.schedule, case.edges).ranks:
        for action in actions:
            if not action.kind.is_compute:
                assert get_transfer_partner(get_transfer_partner(action)) == action
                assert get_transfer_send(action) == get_transfer_send(get_transfer_partner(action))
                assert get_transfer_send(action).kind in (ActionKind.SEND_F, ActionKind.SEND_B)


def numbered(*microbatches: int) -> list[Action]:
    return [Action(0, ActionKind.F, m) for m in microbatches]


def test_earliest_times() -> None:
    """Two lanes that share an event, one event in no lane, one cause across."""
    a, b, c, d, e = numbered(0, 1, 2, 3, 4)
    seconds = {a: 2.0, b: 1.0, c: 4.0, d: 0.5, e: 1.0}
    times = compute_earliest_times(
        [[a, c], [b, c, d]], {d: [a], e: [b]}, lambda event: seconds[event]
    )
    assert times == {a: (0, 2), b: (0, 1), c: (2, 6), d: (6, 6.5), e: (1, 2)}


def test_lanes_that_contradict_each_other() -> None:
    a, b, missing = numbered(0, 1, 2)
    with pytest.raises(FxpartError, match="2 actions wait for each other"):
        compute_earliest_times([[a, b], [b, a]], {}, lambda _: 1.0)
    with pytest.raises(FxpartError, match="1 actions wait"):
        compute_earliest_times([[a]], {a: [missing]}, lambda _: 1.0)


def test_no_torch() -> None:
    """Plans are explained and schedules checked without torch, NumPy or a solver."""
    names = ("builders", "lower", "rank_merge", "verify", "simulate", "text", "torch_csv")
    code = "import sys\n" + "".join(f"import fxpart.schedule.{name}\n" for name in names)
    code += "print([m for m in ('torch', 'numpy', 'ortools', 'msgspec') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert one_f_one_b(1, 1).trains
