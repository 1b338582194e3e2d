"""Supervisor of a run on this host: restarts ranks, or continues with fewer or more of them."""

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
    is_finished,
    read_checkpoint_step,
    read_ledger_step,
    read_saved_step,
)
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.scale_request import LauncherLock, lock_run
from fxpart.errors import EXIT_INFEASIBLE, EXIT_RUN, FxpartError, error
from fxpart.launch import JobExit, RankFailure, RankProcesses, start
from fxpart.plan.model import Plan

RESTARTS = 3  # without a new step, then the run stops
LOST_AFTER = 2  # ranks lost on a device without a new step before the device counts as lost
_TOO_MANY_RANKS = ("FXP502", "FXP519")


@dataclass(frozen=True)
class ElasticJob:
    """Job of the supervisor.

    steps: updates of the complete run, as far as known. plan: returns a plan for a number of ranks
    without the named lost devices, and whether it was cached. arguments: of ``fxpart`` for each
    rank, for a plan file. tell: prints a line. advance: precomputes plans for these numbers of
    ranks. slower: returns a faster plan and an explanation if a device has become slow, else None.
    start: starts ranks and waits for them. change: default seconds for a change of ranks, for
    :mod:`fxpart.elastic.policy`. retry: seconds until a lost device is tried again.
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
    """Run the job to its end; return the exit status: 0 if complete, or stopped and saved.

    A rank that ends for another reason than a user error is replaced: all ranks restart from the
    newest checkpoint. If a device loses its rank repeatedly without a new step, the policy decides
    whether the run continues with fewer ranks, down to the minimum; all are tried again later.
    ``fxpart scale`` changes the number at the next step, if there is a plan for it. If a device has
    become slow and another plan is faster, all ranks save and restart with it.

    Raises FXP517 after three restarts without a new step, FXP519 if fewer ranks than the minimum
    are left, FXP521 if another process runs the run, and what planning raises.
    """
    with lock_run(job.run, job.bounds) as lock:
        return _Supervisor(job, lock).run()


@dataclass
class _Supervisor:
    """State between generations.

    target_ranks: number to start. requested: while they ran. failures: since the last new step.
    losses: by device name since then. lost: devices that count as lost. back: time to try these
    again. farthest: last step ever done. replacement: plan that replaces the planned one. timer: of
    the current or last generation.
    """

    job: ElasticJob
    lock: LauncherLock
    target_ranks: int = 0
    requested: int | None = None
    failures: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    lost: frozenset[str] = frozenset()
    back: float = inf
    plan: Plan | None = None
    replacement: Plan | None = None
    farthest: int = 0
    timer: GenerationTimer | None = None

    def run(self) -> int:
        """Run all generations."""
        self.target_ranks = self.job.bounds.most
        while True:
            plan = self._prepare_plan()
            self.plan, self.requested = plan, None
            self.lock.publish_ranks(plan.world)
            self.job.advance(self._list_likely_counts(plan.world))
            before = read_checkpoint_step(self.job.run)
            self.job.tell(f"starting {plan.world} processes from step {before}")
            farthest = max(before, read_ledger_step(self.job.run), self.farthest)
            self.timer = GenerationTimer(self.job.run, farthest)
            ended = self.job.start(
                self.job.arguments(self.job.run.plan), plan.world, on_tick=self._tick
            )
            self.farthest = max(
                read_checkpoint_step(self.job.run), read_ledger_step(self.job.run), farthest
            )
            status = self._handle_exit(ended, plan, self.farthest > farthest)
            if status is not None:
                return status

    # -- which plan ------------------------------------------------------------------------------

    def _prepare_plan(self) -> Plan:
        """Return the next generation's plan with assigned devices, written for the ranks."""
        began = time.perf_counter()
        plan, found = self._find_plan()
        reassigned = reassign_devices(plan, self.plan)
        reassigned.plan.dump(self.job.run.plan)
        if self.plan is not None and plan.world != self.plan.world:
            self.job.tell(_change_ranks(self.plan, reassigned, found, time.perf_counter() - began))
        return reassigned.plan

    def _find_plan(self) -> tuple[Plan, bool]:
        """Return the plan for the wanted number of ranks, or the next fewer with a plan."""
        if (
            self.replacement is not None
            and self.replacement.world == self.target_ranks
            and not self.lost
        ):
            return self.replacement, False
        first: FxpartError | None = None
        for ranks in range(self.target_ranks, self.job.bounds.least - 1, -1):
            try:
                found = self.job.plan(ranks, self.lost)
            except FxpartError as fault:
                if fault.exit_code != EXIT_INFEASIBLE and fault.code not in _TOO_MANY_RANKS:
                    raise
                first = first or fault
                continue
            if first is not None:
                why = first.problems[0].why
                self.job.tell(
                    f"no plan for {self.target_ranks} ranks ({why}): continuing with {ranks}"
                )
            self.target_ranks = ranks
            return found
        assert first is not None, "the bounds are not empty"
        if first.code == "FXP519":
            raise self._make_too_few_error(first)
        raise first

    def _make_too_few_error(self, fault: FxpartError) -> FxpartError:
        return error(
            "FXP519",
            where=str(self.job.run.path),
            why=f"{fault.problems[0].why}; --nproc {self.job.bounds}",
            fix="add devices, or restart with a smaller minimum; checkpoints are kept",
        )

    def _list_likely_counts(self, world: int) -> list[int]:
        """Return numbers of ranks that may follow, the most likely first."""
        near = [world - 1, world + 1, self.job.bounds.most]
        rest = range(self.job.bounds.most, self.job.bounds.least - 1, -1)
        return [n for n in dict.fromkeys([*near, *rest]) if n in self.job.bounds and n != world]

    # -- while they run --------------------------------------------------------------------------

    def _tick(self, running: RankProcesses) -> None:
        """Ask the ranks to save and stop if another number of them is requested."""
        assert self.plan is not None and self.timer is not None
        self.timer.poll()
        world, asked = self.plan.world, self.lock.read_request()
        if asked is None and time.monotonic() >= self.back:
            asked, self.back = self.job.bounds.most, inf
        if asked is not None and (asked == world or self._has_plan(asked)):
            self.lost, self.back = frozenset(), inf
            if asked not in (world, self.requested):
                self.job.tell(f"{asked} ranks are requested instead of {world}: saving first")
                self._change_ranks(running, asked)
        elif self.requested is None and (found := self.job.slower(self.plan)) is not None:
            self.replacement, words = found
            self.job.tell(f"{words}: saving first")
            self._change_ranks(running, world)

    def _has_plan(self, ranks: int) -> bool:
        """Return whether there is a plan for this number of ranks, before any rank is stopped."""
        assert self.plan is not None
        try:
            self.job.plan(ranks, frozenset())
        except FxpartError as fault:
            why = fault.problems[0].why
            now = self.plan.world
            self.job.tell(f"no plan for {ranks} ranks ({why}): continuing with {now}")
            return False
        return True

    def _change_ranks(self, running: RankProcesses, ranks: int) -> None:
        self.requested = ranks
        running.send(signal.SIGUSR1)

    # -- after they ended ------------------------------------------------------------------------

    def _handle_exit(self, ended: JobExit, plan: Plan, made_progress: bool) -> int | None:
        """Return the exit status, or None to continue. made_progress: whether a new step was
        done.
        """
        if ended.asked is not None:
            self._explain_resume(signal.Signals(ended.asked).name)
            return ended.code
        failed = ended.first
        # the signal came before its handler was installed
        stopped = failed is None or failed.status == -signal.SIGUSR1
        if stopped and self.requested is not None:
            self.target_ranks, self.failures = self.requested, 0
            return 0 if is_finished(self.job.run) else None
        if failed is None:
            self._explain_resume("stopped")
            return 0
        if failed.is_explained and failed.status != EXIT_RUN:
            self.job.tell(f"rank {failed.rank} failed; see its message above")
            return failed.status
        if made_progress:
            self.failures, self.losses = 0, Counter()
        self.failures += 1
        if self.failures > RESTARTS:
            raise self._make_no_progress_error(failed)
        if self.requested is not None:
            self.target_ranks = self.requested
        self._handle_loss(failed, plan)
        return None

    def _explain_resume(self, why: str) -> None:
        """Explain how to resume, if the run is not complete."""
        if not is_finished(self.job.run):
            done = read_saved_step(self.job.run) or 0
            self.job.tell(f"{why}: {done} steps are saved; run the same command to resume")

    def _handle_loss(self, failed: RankFailure, plan: Plan) -> None:
        """Replace the rank, or continue without its device."""
        name = plan.device(failed.rank).name if failed.rank < plan.world else ""
        self.losses[name] += not failed.is_explained
        self.job.tell(
            f"rank {failed.rank} ({name}) ended with {failed.how}; "
            f"{read_saved_step(self.job.run) or 0} steps are saved"
        )
        if self.losses[name] < LOST_AFTER or self.target_ranks <= self.job.bounds.least:
            return
        lost = self.lost | {name}
        try:
            smaller, _ = self.job.plan(plan.world - 1, lost)
        except FxpartError:
            return  # no plan for fewer ranks: try again with all
        assert self.timer is not None, "a generation has run"
        predicted = plan.prediction.step_seconds, smaller.prediction.step_seconds
        full, small = calibrate_step_seconds(predicted, self.timer.step_seconds)
        left = max(1, self.job.steps - read_checkpoint_step(self.job.run))
        arrivals = ((0.5, self.job.retry), (0.5, inf))
        change = self.timer.start_seconds or self.job.change
        decision = decide(RankLossScenario(left, full, small, change, arrivals))
        self.job.tell(f"{name} has lost its rank {self.losses[name]} times: {decision.words}")
        if not decision.smaller:
            time.sleep(min(decision.wait, self.job.retry))
            return
        self.lost, self.target_ranks = lost, plan.world - 1
        self.back = time.monotonic() + self.job.retry

    def _make_no_progress_error(self, failed: RankFailure) -> FxpartError:
        return error(
            "FXP517",
            where=str(self.job.run.path),
            why=f"{RESTARTS} restarts since step {self.farthest}; the last ended with: rank "
            f"{failed.rank}: {failed.how}",
            fix="fix the cause, then run the same command again",
        )


def _change_ranks(old: Plan, reassigned: DeviceReassignment, found: bool, seconds: float) -> str:
    """Describe a change of ranks."""
    plan = reassigned.plan
    share = reassigned.moved / max(1.0, 12.0 * sum(s.parameters for s in plan.stages))
    how = "plan from the cache" if found else "new plan"
    return (
        f"{old.world} -> {plan.world} ranks in {seconds:.2f} s: {how}; {len(reassigned.ranks)} "
        f"ranks load {min(1.0, share):.0%} of the state from checkpoints"
    )
