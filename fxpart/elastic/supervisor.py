"""A run on this machine that outlives its ranks: replaced, or done without, fewer or more."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.device_reassignment import DeviceReassignment, reassign_devices
from fxpart.elastic.policy import RankLossScenario, calibrate_step_seconds, decide
from fxpart.elastic.progress import (
    GenerationTimer,
    finished,
    read_checkpoint_step,
    read_ledger_step,
)
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.scale_request import RunLock, lock_run
from fxpart.errors import EXIT_INFEASIBLE, EXIT_RUN, FxpartError, error
from fxpart.launch import JobExit, RankFailure, RankProcesses, start
from fxpart.plan.model import Plan

RESTARTS = 3  # without a step more, and it stops
TWICE = 2  # a device that loses its rank so often without a step more is taken for lost
_TOO_MANY_RANKS = ("FXP502", "FXP519")


@dataclass(frozen=True)
class ElasticJob:
    """What is supervised.

    steps: updates at which the run is done, as far as that is known. plan: for so many ranks of the
    devices that are left (names of those that are not beside), and whether it was found rather than
    made. arguments: of ``fxpart`` for each rank, given the plan's file. tell: a line for a person.
    advance: have plans for these numbers of ranks made meanwhile. slower: where ranks say that a
    device has become slow, a faster plan for as many of them, and why, in words; else None. start:
    starts ranks and waits for them. change: seconds that a change of ranks takes where none was
    seen, for :mod:`.policy`. retry: seconds after which a device that was taken for lost is tried
    again.
    """

    bounds: RankBounds
    run: RunDir
    steps: int
    plan: Callable[[int, frozenset[str]], tuple[Plan, bool]]
    arguments: Callable[[Path], Sequence[str]]
    tell: Callable[[str], None]
    advance: Callable[[Iterable[int]], None] = lambda numbers: None
    slower: Callable[[Plan], tuple[Plan, str] | None] = lambda plan: None
    start: Callable[..., JobExit] = start
    change: float = 10.0
    retry: float = 600.0


def supervise(job: ElasticJob) -> int:
    """Run the job to its end; the exit status: 0 where it is done, or was stopped with all saved.

    A rank that ends otherwise than by a mistake of the user is replaced: all ranks start again
    from the newest checkpoint. Where its device loses it again without a step more, the policy
    decides whether the run goes on with fewer, down to the bounds' least; it is tried with all
    again later. ``fxpart scale`` changes the number at the next step, if there is a plan for it.
    Where a device has become slow and another plan is faster, all start again by it, saved before.

    Raises FXP517 after three restarts without a step more, FXP519 where fewer ranks are left than
    the least, FXP109 where another launcher runs the run, and what planning raises.
    """
    with lock_run(job.run, job.bounds) as holder:
        return _Supervisor(job, holder).run()


@dataclass
class _Supervisor:
    """What is known between generations.

    wanted: ranks there are to be. wish: what was asked for while they ran. failures: since the
    last step more. losses: by device's name since then. lost: devices taken for lost. back: when
    to try these again. farthest: step that was ever done. better: a plan in place of what is
    planned for its number of ranks. pace: of the generation that runs, or ran last.
    """

    job: ElasticJob
    holder: RunLock
    wanted: int = 0
    wish: int | None = None
    failures: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    lost: frozenset[str] = frozenset()
    back: float = inf
    plan: Plan | None = None
    better: Plan | None = None
    farthest: int = 0
    pace: GenerationTimer | None = None

    def run(self) -> int:
        """All generations."""
        self.wanted = self.job.bounds.most
        while True:
            plan = self._next()
            self.plan, self.wish = plan, None
            self.holder.tell(plan.world)
            self.job.advance(self._neighbours(plan.world))
            before = read_checkpoint_step(self.job.run)
            self.job.tell(f"starting {plan.world} processes from step {before}")
            farthest = max(before, read_ledger_step(self.job.run), self.farthest)
            self.pace = GenerationTimer(self.job.run, farthest)
            ended = self.job.start(
                self.job.arguments(self.job.run.plan), plan.world, on_tick=self._tick
            )
            self.farthest = max(
                read_checkpoint_step(self.job.run), read_ledger_step(self.job.run), farthest
            )
            status = self._judge(ended, plan, self.farthest > farthest)
            if status is not None:
                return status

    # -- which plan ------------------------------------------------------------------------------

    def _next(self) -> Plan:
        """The next generation's plan, its seats chosen, written where the ranks read it."""
        began = time.perf_counter()
        plan, found = self._feasible()
        seated = reassign_devices(plan, self.plan)
        seated.plan.dump(self.job.run.plan)
        if self.plan is not None and plan.world != self.plan.world:
            self.job.tell(_change(self.plan, seated, found, time.perf_counter() - began))
        return seated.plan

    def _feasible(self) -> tuple[Plan, bool]:
        """For as many ranks as wanted, or for the next fewer that have a plan."""
        if self.better is not None and self.better.world == self.wanted and not self.lost:
            return self.better, False
        first: FxpartError | None = None
        for ranks in range(self.wanted, self.job.bounds.least - 1, -1):
            try:
                found = self.job.plan(ranks, self.lost)
            except FxpartError as fault:
                if fault.exit_code != EXIT_INFEASIBLE and fault.code not in _TOO_MANY_RANKS:
                    raise
                first = first or fault
                continue
            if first is not None:
                why = first.problems[0].why
                self.job.tell(f"no plan for {self.wanted} ranks ({why}): going on with {ranks}")
            self.wanted = ranks
            return found
        assert first is not None, "the bounds hold a number"
        if first.code == "FXP519":
            raise self._too_few(first)
        raise first

    def _too_few(self, fault: FxpartError) -> FxpartError:
        return error(
            "FXP519",
            where=str(self.job.run.path),
            why=f"{fault.problems[0].why}; --nproc {self.job.bounds}",
            fix="add devices, or run with a smaller minimum; nothing is lost",
        )

    def _neighbours(self, world: int) -> list[int]:
        """Numbers of ranks that may be next, the likeliest first."""
        near = [world - 1, world + 1, self.job.bounds.most]
        rest = range(self.job.bounds.most, self.job.bounds.least - 1, -1)
        return [n for n in dict.fromkeys([*near, *rest]) if n in self.job.bounds and n != world]

    # -- while they run --------------------------------------------------------------------------

    def _tick(self, running: RankProcesses) -> None:
        """Ask the ranks to save and stop where another number of them is wished for."""
        assert self.plan is not None and self.pace is not None
        self.pace.look()
        world, asked = self.plan.world, self.holder.wish()
        if asked is None and time.monotonic() >= self.back:
            asked, self.back = self.job.bounds.most, inf
        if asked is not None and (asked == world or self._possible(asked)):
            self.lost, self.back = frozenset(), inf
            if asked not in (world, self.wish):
                self.job.tell(f"{asked} ranks are asked for in place of {world}: saving first")
                self._change(running, asked)
        elif self.wish is None and (found := self.job.slower(self.plan)) is not None:
            self.better, words = found
            self.job.tell(f"{words}: saving first")
            self._change(running, world)

    def _possible(self, ranks: int) -> bool:
        """Whether there is a plan for so many; where there is none, nobody has to stop for it."""
        assert self.plan is not None
        try:
            self.job.plan(ranks, frozenset())
        except FxpartError as fault:
            why = fault.problems[0].why
            now = self.plan.world
            self.job.tell(f"no plan for {ranks} ranks ({why}): going on with {now}")
            return False
        return True

    def _change(self, running: RankProcesses, ranks: int) -> None:
        self.wish = ranks
        running.send(signal.SIGUSR1)

    # -- after they ended ------------------------------------------------------------------------

    def _judge(self, ended: JobExit, plan: Plan, further: bool) -> int | None:
        """The exit status, or None to go on. further: whether a step more was done."""
        if ended.asked is not None:
            self._leave(signal.Signals(ended.asked).name)
            return ended.code
        failed = ended.first
        stopped = failed is None or failed.status == -signal.SIGUSR1  # hit before it could listen
        if stopped and self.wish is not None:
            self.wanted, self.failures = self.wish, 0
            return 0 if finished(self.job.run) else None
        if failed is None:
            self._leave("stopped")
            return 0
        if failed.told and failed.status != EXIT_RUN:
            self.job.tell(f"rank {failed.rank} failed; its message stands above")
            return failed.status
        if further:
            self.failures, self.losses = 0, Counter()
        self.failures += 1
        if self.failures > RESTARTS:
            raise self._no_progress(failed)
        if self.wish is not None:
            self.wanted = self.wish
        self._lost(failed, plan)
        return None

    def _leave(self, why: str) -> None:
        """Say how to go on, where something is left to do."""
        if not finished(self.job.run):
            done = read_checkpoint_step(self.job.run)
            self.job.tell(f"{why}: {done} steps are saved; the same command goes on")

    def _lost(self, failed: RankFailure, plan: Plan) -> None:
        """Replace the rank, or go on without its device."""
        name = plan.device(failed.rank).name if failed.rank < plan.world else ""
        self.losses[name] += not failed.told
        self.job.tell(
            f"rank {failed.rank} ({name}) ended with {failed.how}; "
            f"{read_checkpoint_step(self.job.run)} steps are "
            "saved"
        )
        if self.losses[name] < TWICE or self.wanted <= self.job.bounds.least:
            return
        lost = self.lost | {name}
        try:
            smaller, _ = self.job.plan(plan.world - 1, lost)
        except FxpartError:
            return  # there is no plan for fewer: it is tried with all again
        assert self.pace is not None, "it has just run"
        predicted = plan.prediction.step_seconds, smaller.prediction.step_seconds
        full, small = calibrate_step_seconds(predicted, self.pace.step_seconds)
        left = max(1, self.job.steps - read_checkpoint_step(self.job.run))
        arrivals = ((0.5, self.job.retry), (0.5, inf))
        change = self.pace.start_seconds or self.job.change
        decision = decide(RankLossScenario(left, full, small, change, arrivals))
        self.job.tell(f"{name} lost its rank {self.losses[name]} times: {decision.words}")
        if not decision.smaller:
            time.sleep(min(decision.wait, self.job.retry))
            return
        self.lost, self.wanted = lost, plan.world - 1
        self.back = time.monotonic() + self.job.retry

    def _no_progress(self, failed: RankFailure) -> FxpartError:
        return error(
            "FXP517",
            where=str(self.job.run.path),
            why=f"{RESTARTS} restarts since step {self.farthest}; the last ended with: rank "
            f"{failed.rank}: {failed.how}",
            fix="mend the cause, then run the same command again",
        )


def _change(old: Plan, seated: DeviceReassignment, found: bool, seconds: float) -> str:
    """A change of ranks in words."""
    plan = seated.plan
    share = seated.moved / max(1.0, 12.0 * sum(s.parameters for s in plan.stages))
    how = "its plan was made in advance" if found else "planned anew"
    return (
        f"{old.world} -> {plan.world} ranks in {seconds:.2f} s: {how}; {len(seated.ranks)} ranks "
        f"take {min(1.0, share):.0%} of the state from elsewhere"
    )
