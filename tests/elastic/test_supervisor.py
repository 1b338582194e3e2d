"""The launcher's decisions, with ranks that end as each test says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sample_plans
from checkpoint_files import Sample

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.available_cluster import remove_devices
from fxpart.elastic.progress import (
    GenerationTimer,
    is_finished,
    read_checkpoint_step,
    read_end_reason,
    read_ledger_step,
    read_saved_step,
)
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.scale_request import request_rank_count
from fxpart.elastic.supervisor import ElasticJob, supervise
from fxpart.errors import FxpartError, error
from fxpart.launch import JobExit, RankFailure
from fxpart.plan.model import Plan

KILLED = -int(signal.SIGKILL)


class World:
    """Ranks that are not there: each generation is a function of the run and its plan."""

    def __init__(self, path: Path, bounds: str, generations: Sequence[Any], **more: Any) -> None:
        self.run = RunDir(path)
        self.generations: Iterator[Any] = iter(generations)
        self.worlds: list[int] = []
        self.plans: list[Plan] = []
        self.lines: list[str] = []
        self.sent: list[int] = []
        self.refused: set[int] = set()
        self.advanced: list[list[int]] = []
        self.job = ElasticJob(
            bounds=RankBounds.parse(bounds), run=self.run, steps=100, plan=self.plan,
            arguments=lambda path: ["train", "--plan", str(path)], tell=self.lines.append,
            advance=lambda numbers: self.advanced.append(list(numbers)), start=self.start, **more,
        )  # fmt: skip

    def plan(self, ranks: int, lost: frozenset[str]) -> tuple[Plan, bool]:
        if ranks in self.refused:
            raise error("FXP204", where="x", why="it does not fit", fix="")
        left = remove_devices(sample_plans.cluster(4), lost)
        if len(left.devices) < ranks:
            raise error("FXP519", where="x", why=f"{len(left.devices)} devices are left", fix="")
        return sample_plans.plan(ranks, blocks=12), True

    def start(
        self, arguments: Sequence[str], ranks: int, *, on_tick: Callable[[Any], object]
    ) -> JobExit:
        plan = Plan.load(arguments[-1])
        assert plan.world == ranks
        self.worlds.append(ranks)
        self.plans.append(plan)
        ended = next(self.generations)(self, lambda: on_tick(self))
        assert isinstance(ended, JobExit)
        return ended

    def send(self, number: int) -> None:
        self.sent.append(number)

    def save(self, step: int) -> None:
        if not (self.run.checkpoints / f"step-{step:010d}").exists():
            self.run.checkpoints.mkdir(parents=True, exist_ok=True)
            Sample.make(0).save(self.run.checkpoints, step)

    def supervise(self) -> int:
        return supervise(self.job)


def ends(step: int = 0, rank: int | None = None, status: int = KILLED) -> Callable[..., JobExit]:
    """A generation that saves at a step, and whose rank ends with that status."""

    def generation(world: World, tick: Callable[[], None]) -> JobExit:
        if step:
            world.save(step)
        tick()
        return JobExit(None if rank is None else RankFailure(rank, 1, status))

    return generation


def scaled(
    ranks: int, step: int, status: int | None = None, how: str = "SIGUSR1 to rank 0"
) -> Callable[..., JobExit]:
    """A generation that is asked to be another, and saves at a step when it is told."""

    def generation(world: World, tick: Callable[[], None]) -> JobExit:
        before = len(world.sent)
        request_rank_count(world.run, ranks)
        tick()
        tick()
        assert world.sent[before:] == ([signal.SIGUSR1] if ranks != world.worlds[-1] else [])
        world.save(step)
        with world.run.generations.open("a") as file:
            file.write(f'{{"line":"ended","generation":1,"ended":0,"step":{step},"how":"{how}"}}\n')
        return JobExit(None if status is None else RankFailure(0, 1, status))

    return generation


def test_a_run_without_events(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [ends(100)])
    assert world.supervise() == 0
    assert world.worlds == [4]
    assert world.advanced == [[3, 2]]


def test_four_three_two_four(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [scaled(3, 10), scaled(2, 20), scaled(4, 30), ends(100)])
    assert world.supervise() == 0
    assert world.worlds == [4, 3, 2, 4]
    assert any("4 -> 3 ranks" in line and "plan from the cache" in line for line in world.lines)
    assert world.advanced[1] == [2, 4]


def test_a_signal_before_the_ranks_listen_is_a_stop_too(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [scaled(3, 10, -int(signal.SIGUSR1)), ends(100)])
    assert world.supervise() == 0
    assert world.worlds == [4, 3]


def test_a_faster_plan_for_ranks_that_have_become_slow(tmp_path: Path) -> None:
    """It stays until the number of ranks is another one."""
    better = sample_plans.plan(4, blocks=16)
    offers = iter([None, (better, "rank 1 is 3 times slower")])
    before: list[Plan] = []

    def slower(plan: Plan) -> tuple[Plan, str] | None:
        before.append(plan)
        return next(offers, None)

    def slow(world: World, tick: Callable[[], None]) -> JobExit:
        tick()
        assert world.sent == []
        tick()
        tick()
        assert world.sent == [signal.SIGUSR1]
        world.save(30)
        return JobExit(None)

    generations = [slow, ends(40, rank=2), scaled(3, 50), scaled(4, 60), ends(100)]
    world = World(tmp_path, "2:4", generations, slower=slower)
    assert world.supervise() == 0
    assert world.worlds == [4, 4, 4, 3, 4]
    cuts = [[stage.first for stage in plan.stages] for plan in (better, *world.plans)]
    assert [cut == cuts[0] for cut in cuts[1:]] == [False, True, True, False, True]
    assert before[0] == before[1] == world.plans[0]
    assert "rank 1 is 3 times slower: saving first" in world.lines


def test_the_number_there_is_asks_nobody_to_stop(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [scaled(4, 100)])
    assert world.supervise() == 0
    assert world.worlds == [4]


def test_a_run_that_is_done_when_it_is_to_change(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [scaled(3, 100, how="steps")])
    assert world.supervise() == 0
    assert world.worlds == [4]


def test_a_lost_rank_is_replaced_with_the_same_seats(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [ends(10, 1), ends(20, 1), ends(30, 0), ends(100)])
    assert world.supervise() == 0
    assert world.worlds == [4] * 4
    assert all(plan == world.plans[0] for plan in world.plans)
    words = "rank 1 (host0/cpu:1) ended with signal 9; 10 steps are saved"
    assert any(words in line for line in world.lines)


def test_a_device_that_loses_its_rank_twice_is_done_without(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [ends(10, 2), ends(0, 2), ends(100)])
    assert world.supervise() == 0
    # The first loss came with steps more; the second without any; both on one device.
    assert world.worlds == [4, 4, 3]
    assert any("continuing with fewer ranks" in line for line in world.lines)


def test_it_is_tried_with_all_again_later(tmp_path: Path) -> None:
    def later(world: World, tick: Callable[[], None]) -> JobExit:
        tick()
        assert world.sent == [signal.SIGUSR1]
        world.save(50)
        return JobExit()

    world = World(tmp_path, "2:4", [ends(10, 2), ends(0, 2), later, ends(100)], retry=1e-9)
    world.job = _with(world.job, change=0.0)
    assert world.supervise() == 0
    assert world.worlds[-1] == 4


def _with(job: ElasticJob, **fields: Any) -> ElasticJob:
    from dataclasses import replace

    return replace(job, **fields)


def test_three_restarts_without_a_step_more(tmp_path: Path) -> None:
    world = World(tmp_path, "4", [ends(10, 0)] + [ends(0, 0)] * 9)
    with pytest.raises(FxpartError) as caught:
        world.supervise()
    (problem,) = caught.value.problems
    assert problem.code == "FXP517"
    assert "3 restarts since step 10" in problem.why and "rank 0: signal 9" in problem.why
    assert world.worlds == [4] * 4


def test_a_users_mistake_is_not_repeated(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [ends(0, 1, 2)])
    assert world.supervise() == 2
    assert world.worlds == [4]


def test_a_failed_stage_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [ends(0, 1, 5), ends(100)])
    assert world.supervise() == 0
    assert world.worlds == [4, 4]


def test_asked_to_end(tmp_path: Path) -> None:
    def stopped(world: World, tick: Callable[[], None]) -> JobExit:
        world.save(40)
        return JobExit(asked=int(signal.SIGTERM))

    world = World(tmp_path, "2:4", [stopped])
    assert world.supervise() == 0
    assert read_checkpoint_step(world.run) == 40


def test_a_number_without_a_plan_stops_nobody(tmp_path: Path) -> None:
    """Whoever asked for it is told, once, and the ranks train on; another number is taken then."""

    def undisturbed(world: World, tick: Callable[[], None]) -> JobExit:
        before = list(world.sent)
        request_rank_count(world.run, 3)
        for _ in range(3):
            tick()
        assert world.sent == before
        world.save(20)
        request_rank_count(world.run, 4)
        tick()
        assert world.sent == [*before, signal.SIGUSR1]
        return JobExit()

    world = World(tmp_path, "2:4", [scaled(2, 10), undisturbed, ends(100)])
    world.refused = {3}
    assert world.supervise() == 0
    assert world.worlds == [4, 2, 4]
    words = "no plan for 3 ranks (it does not fit): continuing with 2"
    assert [words in line for line in world.lines].count(True) == 1


def test_a_lost_number_without_a_plan_is_left_out(tmp_path: Path) -> None:
    """At the start there is nobody to disturb: the next number that has a plan."""
    world = World(tmp_path, "2:4", [ends(100)])
    world.refused = {4}
    assert world.supervise() == 0
    assert world.worlds == [3]
    assert any("no plan for 4 ranks (it does not fit): continuing with 3" in x for x in world.lines)


def test_the_words_at_an_end(tmp_path: Path) -> None:
    """That the same command goes on is said where the job ends, and is not done."""

    def stopped(world: World, tick: Callable[[], None]) -> JobExit:
        world.save(40)
        return JobExit(asked=int(signal.SIGTERM))

    world = World(tmp_path, "2:4", [scaled(3, 10), scaled(4, 20), stopped])
    assert world.supervise() == 0
    told = [line for line in world.lines if "the same command" in line]
    assert told == ["SIGTERM: 40 steps are saved; run the same command to resume"]
    assert world.lines[-1] == told[0]
    done = World(tmp_path / "done", "2:4", [scaled(3, 100, how="steps")])
    assert done.supervise() == 0
    assert not any("the same command" in line for line in done.lines)


def test_no_plan_at_all(tmp_path: Path) -> None:
    world = World(tmp_path, "2:4", [])
    world.refused = {2, 3, 4}
    with pytest.raises(FxpartError, match="FXP204"):
        world.supervise()


def test_fewer_devices_than_the_least(tmp_path: Path) -> None:
    world = World(tmp_path, "5:6", [])
    with pytest.raises(FxpartError) as caught:
        world.supervise()
    (problem,) = caught.value.problems
    assert problem.code == "FXP519" and problem.why == "4 devices are left; --nproc 5:6"


def test_a_step_that_was_not_saved_is_progress_too(tmp_path: Path) -> None:
    def further(world: World, tick: Callable[[], None]) -> JobExit:
        step = read_ledger_step(world.run) + 1
        with world.run.ledger.open("a") as file:
            file.write(f'{{"line":"update","step":{step}}}\n')
        return JobExit(RankFailure(0, 1, KILLED))

    world = World(tmp_path, "4", [further] * 6 + [ends(100)])
    assert world.supervise() == 0
    assert len(world.worlds) == 7


@pytest.mark.parametrize("text", ["", "[]", "{", '{"line":"update","step":"9"}', "[" * 99999, "\n"])
def test_what_a_damaged_folder_says(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    for path in (run.ledger, run.generations):
        path.write_text(text)
    assert read_ledger_step(run) == 0 and read_end_reason(run) == "" and not is_finished(run)


def test_the_last_lines_of_a_long_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [f'{{"line":"update","step":{step}}}' for step in range(5000)]
    run.ledger.write_text("\n".join(lines) + '\n{"line":"upd')
    assert read_ledger_step(run) == 4999
    run.generations.write_text('{"line":"ended","how":"data"}\n')
    assert is_finished(run)
    run.generations.write_text('{"line":"ended","how":"data"}\n{"line":"began"}\n')
    assert not is_finished(run)


def test_the_pace_of_a_generation(tmp_path: Path) -> None:
    run, now = RunDir(tmp_path), 100.0
    pace = GenerationTimer(run, 10, lambda: now)
    for at, step in ((100.5, 11), (105.0, 10), (112.0, 12), (112.5, 13), (122.0, 32)):
        run.ledger.write_text(f'{{"line":"update","step":{step}}}\n')
        now = at
        pace.poll()
    # Seen: nothing more at 105 s, step 12 at 112 s, step 32 at 122 s.
    assert pace.start_seconds == 12.0
    assert pace.step_seconds == 0.5
    assert GenerationTimer(run, 99, lambda: now).step_seconds == 0.0


def test_a_damaged_checkpoint_is_not_called_saved(tmp_path: Path) -> None:
    world = World(tmp_path, "2:2", [])
    world.save(10)
    world.save(20)
    (world.run.checkpoints / "step-0000000020" / "manifest.json").write_text("{}")
    assert (read_checkpoint_step(world.run), read_saved_step(world.run)) == (20, 10)


def test_what_counts_as_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_checkpoint_step(run) == 0
    for name in ("step-0000000012", "step-3", ".partial-g1-step-0000000099", "step-00000000123"):
        (run.checkpoints / name).mkdir(parents=True)
    assert read_checkpoint_step(run) == 12
