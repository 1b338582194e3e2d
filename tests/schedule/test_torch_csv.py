"""The CSV form, with torch.distributed.pipelining as the second reader and writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_draws import broken, drawn

from fxpart.errors import FxpartError
from fxpart.schedule.action import ActionKind, Schedule, StageEdge, parse
from fxpart.schedule.builders import (
    assign_loop_ranks,
    assign_v_ranks,
    gpipe,
    one_f_one_b,
)
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.rank_merge import merge_onto_ranks
from fxpart.schedule.simulate import Sends, simulate
from fxpart.schedule.text import from_text, to_text
from fxpart.schedule.torch_csv import from_torch_csv, to_torch_csv
from fxpart.schedule.verify import check


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def neighbours_only(stages: int, ranks: list[int]) -> Schedule:
    return merge_onto_ranks(one_f_one_b(stages, 4), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [gpipe(4, 6), one_f_one_b(4, 6), one_f_one_b(5, 2), neighbours_only(4, [0, 1, 0, 1]),
     neighbours_only(6, [0, 1, 2, 0, 1, 2]), neighbours_only(4, [0, 0, 1, 1]),
     BUILDERS["interleaved"](assign_loop_ranks(8, 4), 8),
     BUILDERS["breadth-first"](assign_loop_ranks(6, 2), 5),
     BUILDERS["zb-h1"](4, 6), BUILDERS["zb-v"](assign_v_ranks(6), 8), BUILDERS["forward"](3, 4)],
    ids=["gpipe", "1f1b", "short", "two-by-two", "two-by-three", "neighbours", "interleaved",
         "breadth-first", "zb-h1", "zb-v", "forward"],
)  # fmt: skip
def test_torch_accepts_what_we_write(torch_schedules: Any, schedule: Schedule) -> None:
    """Its parser, its validator and its simulator of transfers; then back again, unchanged."""
    edges = chain(schedule.stages)
    lowered = lower(schedule, edges)
    text = to_torch_csv(lowered)
    rows = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }
    placed = dict(enumerate(lowered.stage_rank))
    if lowered.trains:  # evaluation is no schedule in its validator's eyes
        assert placed == torch_schedules._validate_schedule(
            rows, len(lowered.ranks), lowered.stages, lowered.microbatches
        )
    ran = torch_schedules._simulate_comms_compute(rows, lambda s: placed[s], lowered.stages)
    for rank, actions in enumerate(lowered.ranks):
        assert [str(a) for a in ran[rank] if a is not None] == [str(a) for a in actions]
    assert from_torch_csv(text, lowered.name) == lowered
    assert from_torch_csv(to_torch_csv(schedule), schedule.name) == schedule


@pytest.mark.slow
def test_torch_judges_random_schedules_alike(torch_schedules: Any) -> None:
    """Chains of any order, placement and split: it accepts them; where one lacks an action, not."""
    source, seen, split, virtual = Random(3), 0, 0, 0
    while seen < 30:
        case = drawn(source)
        one = case.lowered
        if case.edges != chain(one.stages) or case.stash or one.replicas or not one.trains:
            continue
        seen += 1
        split += any(a.kind is ActionKind.I for actions in one.ranks for a in actions)
        virtual += len(one.ranks) < one.stages
        assert torch_accepts(torch_schedules, one)
        bare = computations_of(one)
        less = broken(source, bare, "drop")
        assert less is not None and not torch_accepts(torch_schedules, less)
    assert min(split, virtual) > 5


def torch_accepts(torch_schedules: Any, schedule: Schedule) -> bool:
    """Its validator and, where there are transfers, its simulator of them."""
    rows = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_torch_csv(schedule).splitlines())
    }
    try:
        placed = torch_schedules._validate_schedule(
            rows, len(schedule.ranks), schedule.stages, schedule.microbatches
        )
    except (AssertionError, IndexError):  # the second where it draws what it refuses
        return False
    if schedule.is_lowered:
        torch_schedules._simulate_comms_compute(rows, lambda s: placed[s], schedule.stages)
    return placed == dict(enumerate(schedule.stage_rank))


@pytest.mark.slow
def test_torch_loads_the_file(torch_schedules: Any, tmp_path: Path) -> None:
    """The runtime class reads the file as a schedule with transfers and as one without."""
    from unittest import mock

    from torch.distributed.pipelining import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 2, 4, None
    schedule = neighbours_only(4, [0, 1, 0, 1])
    for form, given_schedule in (
        ("compute_only", schedule),
        ("compute_comms", lower(schedule, chain(4))),
    ):
        runtime = torch_schedules._PipelineScheduleRuntime([stage, stage], 4)
        file = tmp_path / f"{form}.csv"
        file.write_text(to_torch_csv(given_schedule), newline="")
        runtime._load_csv(str(file), form)
        out = tmp_path / f"{form}-out.csv"
        runtime._dump_csv(str(out))
        back = from_torch_csv(out.read_text(), "1f1b")
        assert not check(lower(computations_of(back), chain(4)), chain(4))
        assert computations_of(back) == schedule
        if form == "compute_comms":
            assert back == given_schedule


def computations_of(schedule: Schedule) -> Schedule:
    ranks = tuple(tuple(a for a in r if a.kind.is_compute) for r in schedule.ranks)
    return replace(schedule, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_torchs_schedules_pass_our_verifier(name: str, ranks: int, microbatches: int) -> None:
    """What torch builds and lowers for two stages a rank; with its receives deferred to their use
    ("defer_pp_recv") the same schedules count on sends that do not block, and we say so."""
    stages = 2 * ranks
    schedule = from_torch_csv(torch_table(name, ranks, microbatches), name.lower())
    assert (schedule.stages, schedule.microbatches) == (stages, microbatches)
    assert not check(lower(schedule, chain(stages)), chain(stages))
    theirs = from_torch_csv(torch_table(name, ranks, microbatches, with_comms=True), name.lower())
    assert not check(theirs, chain(stages))
    deferred = torch_table(name, ranks, microbatches, with_comms=True, defer_pp_recv=True)
    problems = check(from_torch_csv(deferred, name.lower()), chain(stages))
    assert len(problems) == ranks
    assert all(problem.why.startswith("The action waits for") for problem in problems)


@pytest.mark.slow
def test_torchs_breadth_first_sums_backwards() -> None:
    """It takes the microbatches back in reverse: safe, but not the sums of one process."""
    schedule = from_torch_csv(torch_table("LoopedBFS", 2, 4), "loopedbfs")
    problems = check(lower(schedule, chain(4)), chain(4))
    assert {problem.why for problem in problems} == {"Microbatch 3 runs before it."}


def torch_table(name: str, ranks: int, microbatches: int, **options: bool) -> str:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, ranks, microbatches, 2, **options)
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)


@pytest.mark.slow
def test_our_receives_wait_less(torch_schedules: Any) -> None:
    """Both lowerings are safe; where a receive blocks its rank torch's order serialises 1F1B."""
    stages, m = 4, 8
    rows = {
        rank: [torch_schedules._Action.from_str(str(a)) for a in actions]
        for rank, actions in enumerate(one_f_one_b(stages, m).ranks)
    }
    lowered = torch_schedules._add_send_recv(rows, lambda stage: stage, stages)
    text = "\n".join(",".join(str(a) for a in lowered[rank]) for rank in range(stages))
    theirs = from_torch_csv(text, "1f1b")
    ours = lower(one_f_one_b(stages, m), chain(stages))
    assert not check(theirs, chain(stages))
    assert sorted(map(str, sum(theirs.ranks, ()))) == sorted(map(str, sum(ours.ranks, ())))

    def step(schedule: Schedule, sends: Sends) -> float:
        f, b = [1.0] * stages, [2.0] * stages
        return simulate(schedule, chain(stages), f, b, lambda *_: 0.1, sends=sends).step_seconds

    assert step(ours, "overlapped") == step(theirs, "overlapped")
    ideal = (m + stages - 1) * 3
    assert step(ours, "buffered") < 1.06 * ideal < 1.4 * ideal < step(theirs, "buffered")
    assert step(ours, "rendezvous") < 1.12 * ideal < 1.4 * ideal < step(theirs, "rendezvous")


def test_torchs_other_cells() -> None:
    text = "0UNSHARD,0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,0RESHARD\r\n"
    schedule = from_torch_csv(text, "dual")
    assert [str(a) for a in schedule.ranks[0]] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    "text", ["", "0F0,huh", "1F0,1B0", "0F0,0B0\n0F1,0B1", "0F1,0B1", "(0F0;(0B0))OVERLAP_F_B"]
)
def test_csv_that_is_no_schedule(text: str) -> None:
    with pytest.raises(FxpartError, match="FXP303"):
        from_torch_csv(text, "x")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=100)
def test_no_csv_crashes_the_reader(data: st.DataObject) -> None:
    """Any text, and cells of the grammar in any disorder: it reads, or FXP303 says every fault."""
    cell = st.from_regex(r"[0-3](F|B|I|W|SEND_F|RECV_B|RESHARD)[0-3](>[0-3])?", fullmatch=True)
    junk = st.sampled_from(["", "x", '"', "\r", "\x00", "(0F0;1B0)OVERLAP_F_B", "9" * 30])
    rows = st.lists(st.lists(cell | cell | cell | junk, max_size=6).map(",".join), max_size=3)
    text = data.draw(rows.map("\n".join) | st.text(max_size=60))
    try:
        found = from_torch_csv(text, "x")
    except FxpartError as failure:
        assert {problem.code for problem in failure.problems} == {"FXP303"}
    else:
        check(found, chain(found.stages))
        if sum(map(len, found.ranks)) >= found.stages * found.microbatches:
            assert from_text(to_text(found)) == found


def test_a_cell_without_end() -> None:
    with pytest.raises(FxpartError, match="FXP303"):
        from_torch_csv('"' + "0F0," * 100_000, "x")


def test_what_the_csv_cannot_say() -> None:
    edges = (*chain(3), StageEdge(0, 2))
    with pytest.raises(FxpartError) as caught:
        to_torch_csv(lower(gpipe(3, 2), edges))
    assert len(caught.value.problems) == 8
    assert caught.value.code == "FXP109"
    copies = make("gpipe", (0, 1), 2, (), replicas=((0, 1),))
    with pytest.raises(FxpartError, match="replicated stages"):
        to_torch_csv(copies)
    versions = replace(gpipe(1, 1), ranks=((parse("0F0@1"), parse("0B0@1")),))
    with pytest.raises(FxpartError, match="weight versions"):
        to_torch_csv(versions)
