"""Plans of sharded stages: read, written, migrated, and every fault found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans

from fxpart.errors import FxpartError
from fxpart.plan.migration import VERSION
from fxpart.plan.model import Certificate, Plan, PlanSharding
from fxpart.plan.model import PlanPlacement as placed
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html
from fxpart.report.sharding import explain_placement

GOLDEN = Path(__file__).parents[1] / "golden"

LATER = ("predict_seconds", "staleness")  # of a rank, since version 6
# Of a rank since version 7; and "sums" of its memory.
LAST = ("update", "process", "allocator", "microbatches")
NINE = ("equivalence", "check")  # of a plan, since version 9


def plan(stages: int = 2, mesh: str = "dp=2,tp=2") -> Plan:
    """A plan whose stages are four ranks each."""
    lanes = 4
    whole = sample_plans.plan(stages)
    cluster = sample_plans.cluster(stages * lanes, f"local:{stages * lanes}")
    ranks = tuple(
        msgspec.structs.replace(
            entry, ranks=tuple(range(entry.stage * lanes, (entry.stage + 1) * lanes))
        )
        for entry in whole.prediction.ranks
    )
    return msgspec.structs.replace(
        whole,
        cluster=cluster,
        cluster_hash=cluster.hash,
        mesh={"pipeline": stages, "dp": 2, "tp": 2},
        stages=tuple(
            msgspec.structs.replace(
                stage,
                ranks=tuple(range(stage.index * lanes, (stage.index + 1) * lanes)),
                data_parallel=2,
                tensor_parallel=2,
                zero=1,
            )
            for stage in whole.stages
        ),
        prediction=msgspec.structs.replace(whole.prediction, ranks=ranks),
        sharding=PlanSharding(
            mesh=mesh,
            zero=1,
            zero_axis="dp",
            placed=(
                placed(
                    kind="input",
                    names=(whole.model.inputs[0].name,),
                    placements="dp:S(0)",
                    origins={"dp": "the axis dp cuts the batch"},
                ),
                placed(kind="state", names=("h.0.up.weight",), placements="tp:S(0)"),
                placed(kind="op", names=("linear", "linear_2"), strategy="dp:b,tp:o"),
            ),
            unruled={"aten.foo.default": 2},
            certificate=Certificate(
                status="optimal", objective=1.0, lower_bound=1.0, gap=0.0, solver="dp", over="ops"
            ),
        ),
    )


def altered(**changes: Any) -> Plan:
    """The plan with other fields in its sharding."""
    whole = plan()
    assert whole.sharding is not None
    return msgspec.structs.replace(
        whole, sharding=msgspec.structs.replace(whole.sharding, **changes)
    )


def test_a_plan_of_lanes_is_valid_and_round_trips() -> None:
    whole = plan()
    assert whole.problems() == ()
    assert Plan.loads(whole.dumps()) == whole
    assert Plan.loads(whole.dumps()).dumps() == whole.dumps()


def test_a_plan_of_version_1_still_loads() -> None:
    raw = json.loads((GOLDEN / "plan_version_1.json").read_text())
    found = Plan.load(GOLDEN / "plan_version_1.json")
    assert found.version == VERSION and Plan.loads(found.dumps()) == found
    assert [entry.ranks for entry in found.prediction.ranks] == [(0,), (1,)]
    # Sums of shared parameters, which were all that a stage of one rank summed up.
    assert [entry.tie_seconds for entry in found.prediction.ranks] == [
        entry["sync_seconds"] for entry in raw["prediction"]["ranks"]
    ]
    assert [found.device(rank).name for rank in range(2)] == [
        entry["device"] for entry in raw["prediction"]["ranks"]
    ]


def test_a_plan_of_version_2_says_equal_ranks_once() -> None:
    raw = json.loads((GOLDEN / "plan_version_2.json").read_text())
    found = Plan.load(GOLDEN / "plan_version_2.json")
    assert [entry.ranks for entry in found.prediction.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {stage.zero for stage in found.stages} == {raw["sharding"]["zero"]} == {1}
    for entry in raw["prediction"]["ranks"]:
        group = found.prediction.ranks[entry["stage"]]
        assert group.sync_seconds == entry["sync_seconds"] and group.tie_seconds == 0
        assert msgspec.to_builtins(group.memory) == {**entry["memory"], "copies": 0, "sums": 0}
    raw["prediction"]["ranks"][5]["in_flight"] = 2
    apart = Plan.loads(json.dumps(raw)).prediction.ranks
    assert [entry.ranks for entry in apart] == [(0, 1, 2, 3), (4,), (5,), (6, 7)]


def test_a_plan_of_version_3_minds_no_hosts() -> None:
    raw = json.loads((GOLDEN / "plan_version_3.json").read_text())
    found = Plan.load(GOLDEN / "plan_version_3.json")
    assert found.version == VERSION and Plan.loads(found.dumps()) == found
    assert found.prediction.hosts == ()
    assert {entry.overhead_seconds for entry in found.prediction.ranks} == {0.0}
    again = json.loads(found.dumps())
    for entry in again["prediction"]["ranks"]:
        for name in ("overhead_seconds", "peak", "top", "pieces", *LATER, *LAST):
            del entry[name]
        del entry["memory"]["copies"], entry["memory"]["sums"]
    for name in ("hosts", "rehearsed_seconds", "corrected_seconds", "flushed_seconds"):
        del again["prediction"][name]
    for name in ("actions", "precision", "transfer_dtype", "replicas", "staleness", *NINE):
        del again[name]
    del again["model"]["work"]  # since version 10
    assert {**again, "version": 3} == raw


def test_a_plan_of_version_5_keeps_the_copies_of_its_stash_among_its_weights() -> None:
    raw = json.loads((GOLDEN / "plan_version_5.json").read_text())
    found = Plan.load(GOLDEN / "plan_version_5.json")
    assert found.version == VERSION and Plan.loads(found.dumps()) == found
    assert (found.schedule, found.weights) == ("async", "stash")
    again = json.loads(found.dumps())
    for entry in again["prediction"]["ranks"]:
        assert entry["memory"].pop("copies") == 0 and [entry.pop(n) for n in LATER] == [0.0, 0]
        assert entry["memory"].pop("sums") == 0 and [entry.pop(n) for n in LAST] == 4 * [0]
    assert again["prediction"].pop("flushed_seconds") == 0.0
    assert (
        again["prediction"].pop("corrected_seconds") == 0.0
        and again.pop("replicas") == again.pop("staleness") == []
    )
    assert [again.pop(name) for name in NINE] == [None, None]
    assert again["model"].pop("work") is None
    assert {**again, "version": 5} == raw


def test_a_plan_of_version_2_with_a_wrong_device_is_refused() -> None:
    raw = json.loads((GOLDEN / "plan_version_2.json").read_text())
    raw["prediction"]["ranks"][5]["device"] = "elsewhere"
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(raw))
    assert "device" in caught.value.problems[0].where


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": "dp=2,tp"}, "sharding.mesh"),
        ({"mesh": ""}, "one rank"),
        ({"mesh": "dp=4"}, "but stages and sharding.mesh yield"),
        ({"zero": 4}, "is not 0, 1, 2 or 3"),
        ({"zero_axis": "pp"}, "no axis 'pp'"),
        ({"zero_axis": "dp,pp"}, "no axis 'pp'"),
        ({"zero_axis": ""}, "is no axis"),
        ({"zero_axis": "dp,tp", "zero": 3}, "several for ZeRO 3"),
        ({"zero": 0}, "an axis is specified, but zero is 0"),
        ({"placed": (placed(kind="state", names=(), placements="dp:S(0)"),)}, "names is empty"),
        ({"placed": (placed(kind="state", names=("a",), placements="dp:S"),)}, "S(dim)"),
        ({"placed": (placed(kind="state", names=("a",), placements="x:R"),)}, "the mesh has"),
        ({"placed": (placed(kind="state", names=("a",), strategy="dp:b"),)}, "only ops"),
        ({"placed": (placed(kind="op", names=("a",), strategy="pp:b"),)}, "no axis 'pp'"),
        ({"placed": (placed(kind="op", names=("a",), origins={"pp": "b"}),)}, "no axis 'pp'"),
        ({"placed": (placed(kind="input", names=("nope",), placements="dp:R"),)}, "no input"),
        ({"placed": (placed(kind="op", names=("a", "a"), strategy="dp:b"),)}, "2 times"),
        (
            {"certificate": Certificate(
                status="optimal", objective=1.0, lower_bound=2.0, gap=0.0, solver="x", over=""
            )},
            "sharding.certificate.lower_bound",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found(changes: dict[str, Any], words: str) -> None:
    found = altered(**changes).problems()
    assert any(words in f"{p.where} {p.why}" for p in found), found
    assert {p.code for p in found} == {"FXP303"}


def on_ranks(whole: Plan, ranks: list[tuple[int, ...]]) -> Plan:
    """The plan with other ranks for its stages."""
    return msgspec.structs.replace(
        whole,
        stages=tuple(
            msgspec.structs.replace(stage, ranks=ranks[stage.index]) for stage in whole.stages
        ),
        prediction=msgspec.structs.replace(
            whole.prediction,
            ranks=tuple(
                msgspec.structs.replace(entry, ranks=ranks[entry.stage])
                for entry in whole.prediction.ranks
            ),
        ),
    )


def test_ranks_may_stand_in_any_order() -> None:
    moved = on_ranks(plan(), [(4, 5, 0, 1), (3, 2, 7, 6)])
    assert moved.problems() == ()
    text = moved.dumps()
    assert '"ranks": "4-5,0-1"' in text and '"ranks": "3,2,7,6"' in text
    assert Plan.loads(text) == moved
    for wrong in ([(4, 5, 0, 1), (3, 2, 7, 1)], [(0, 1, 2, 3), (4, 5, 6, 8)]):
        assert on_ranks(plan(), wrong).problems()


def test_the_report_shows_mesh_ranks_and_placements() -> None:
    whole = plan()
    for text in (explain(whole), report_html(whole)):
        for words in ("0-3", "4-7", "dp=2,tp=2", "ZeRO 1 over dp", "h.0.up.weight", "aten.foo"):
            assert words in text, words


def test_why_says_where_a_placement_is_from() -> None:
    whole = plan()
    assert explain_placement(whole, whole.model.inputs[0].name).splitlines() == [
        "input input_ids: dp:S(0)",
        "  dp  the axis dp cuts the batch",
    ]
    with pytest.raises(FxpartError) as caught:
        explain_placement(whole, "linaer")
    assert "linear" in caught.value.problems[0].fix
    with pytest.raises(FxpartError):
        explain_placement(sample_plans.plan(), "linear")
