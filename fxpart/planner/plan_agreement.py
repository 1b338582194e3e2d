"""One plan for all ranks of a job: rank 0 makes it, the others wait for it.

Planners that stop at a time limit find other plans on other processes, and ranks with different
plans cannot train. Rank 0 waits for nobody, so that it may plan alone. Everything goes through the
store that the ranks meet in, before there is a process group as well as after it:

    rank 0                                 rank r
    asks/n: what it plans for, n-th   ->   something else? then it plans by itself
    beat: now and then while it does  ->   waits as long as it hears of it
    plan/...: the plan, or why not    ->   takes it
                                      <-   heard/...: it knows why not

A store outlives its ranks where a launcher keeps it: ranks that are started again find the plan
that they had.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import torch.distributed as dist

from fxpart.compat import default_store
from fxpart.environment import Launch, read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan

_EVERY = 1.0  # seconds between two beats
SILENCE = 60.0  # seconds without word of rank 0 after which it is waited for no longer
_TOLD = 10.0  # seconds of waiting after which that is told
_HEARD = 5.0  # seconds that rank 0 gives the others to hear why there is no plan
_FIRST, _LONGEST = 0.002, 0.05  # seconds between looks

_log = logging.getLogger("fxpart")


class PlanReply(msgspec.Struct, frozen=True):
    """What rank 0 says: the plan's text, or why there is none."""

    plan: str = ""
    problems: tuple[tuple[str, str, str, str], ...] = ()

    @classmethod
    def refusing(cls, fault: BaseException) -> PlanReply:
        """Why there is no plan: an FxpartError's problems, or FXP507 for what is none."""
        if isinstance(fault, FxpartError):
            return cls(problems=tuple((p.code, p.where, p.why, p.fix) for p in fault.problems))
        why = f"{type(fault).__name__}: {fault}"
        return cls(problems=(("FXP507", "rank 0", why, "see what rank 0 says"),))

    @classmethod
    def read(cls, data: bytes) -> PlanReply:
        """From what :meth:`written` gave."""
        return msgspec.json.decode(zlib.decompress(data), type=cls)

    def written(self) -> bytes:
        """As a message; small, as a store takes no large ones."""
        return zlib.compress(msgspec.json.encode(self))

    def taken(self) -> Plan:
        """The plan; raises what rank 0 raised."""
        if self.problems:
            raise FxpartError([Problem(*each) for each in self.problems])
        return Plan.loads(self.plan, "the plan of rank 0")


def agree_on_plan(asked: str, make: Callable[[], Plan], devices: int) -> Plan:
    """The plan that ``make`` gives on rank 0, on every rank that asks for the same.

    asked: what is planned for, as text: a rank that asks for something else makes its own plan,
    which is found out when the programs are compared (FXP501). devices: of the cluster; where they
    are fewer than the processes, no program of theirs can be meant. In one process, and within
    :func:`plan_independently`, ``make`` is called.

    What rank 0 raises is raised on all; FXP516 where a rank hears nothing of it for a minute.
    """
    talk = _talk(devices)
    if talk is None:
        return make()
    number, ask = talk.next(asked)
    if talk.rank == 0:
        return talk.tell(number, ask, make)
    answer = talk.hear(number, ask)
    return make() if answer is None else answer.taken()


def is_multi_rank_job() -> bool:
    """Whether this process is one of several ranks of a job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    try:
        found = read_launch()
    except FxpartError:  # reported where ranks connect
        return False
    return found is not None and found.world > 1


@contextmanager
def plan_independently() -> Iterator[None]:
    """This process alone makes plans meanwhile, and gives them to nobody."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


class _PlanChannel:
    """This rank's side of what is said in one store."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._keys = f"fxpart/plans/{world}"
        self._asked: Counter[str] = Counter()

    def next(self, asked: str) -> tuple[int, str]:
        """How often was asked before, and this time's name: no other has it, on any rank."""
        number = self._asked.total()
        digest = hashlib.sha256(asked.encode()).hexdigest()[:32]
        self._asked[digest] += 1
        return number, f"{digest}-{self._asked[digest]}"

    # -- rank 0 ----------------------------------------------------------------------------------

    def tell(self, number: int, ask: str, make: Callable[[], Plan]) -> Plan:
        """Make the plan, or take the one of an earlier life; the others hear what comes of it."""
        with self._reached():
            self.store.set(f"{self._keys}/asks/{number}", ask)
            before = self._answer(ask)
            if before is not None and before.plan:
                return before.taken()
            self.store.set(f"{self._keys}/{ask}", "")
        try:
            with self._beating():
                plan = make()
        except BaseException as fault:
            with suppress(RuntimeError, ValueError):
                self._refuse(ask, fault)
            raise
        with self._reached():
            self.store.set(f"{self._keys}/{ask}", PlanReply(plan=plan.dumps()).written())
        return plan

    def _refuse(self, ask: str, fault: BaseException) -> None:
        """Say why there is no plan, to this life's ranks alone: in the next there may be one.

        They are given time to hear it, as this process may end by it, and the store with it.
        """
        heard = f"{self._keys}/heard/{ask}"
        before = self.store.add(heard, 0)
        self.store.set(f"{self._keys}/{ask}", PlanReply.refusing(fault).written())
        limit = time.monotonic() + (_HEARD if isinstance(fault, Exception) else 0.0)
        while time.monotonic() < limit and self.store.add(heard, 0) - before < self.world - 1:
            time.sleep(_LONGEST)
        self.store.set(f"{self._keys}/{ask}", "")

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Signs of life while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):
                while not ended.wait(_EVERY):
                    self.store.add(f"{self._keys}/beat", 1)

        thread = threading.Thread(target=beat, name="fxpart-planning", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # -- the other ranks -------------------------------------------------------------------------

    def hear(self, number: int, ask: str) -> PlanReply | None:
        """What rank 0 says; None where it plans for something else. FXP516."""
        with self._reached():
            answer = self._waited(f"{self._keys}/asks/{number}", ask)
            if answer is not None and answer.problems:
                self.store.add(f"{self._keys}/heard/{ask}", 1)
            return answer

    def _waited(self, asks: str, ask: str) -> PlanReply | None:
        began = heard = time.monotonic()
        last: tuple[bytes, int] | None = None
        told, pause = False, _FIRST
        while (answer := self._answer(ask)) is None:
            planned = self.store.get(asks) if self.store.check([asks]) else b""
            if planned not in (b"", ask.encode()):
                return None
            word, now = (planned, self.store.add(f"{self._keys}/beat", 0)), time.monotonic()
            if word != last:
                last, heard = word, now
            if now - heard > SILENCE:
                what = "has said nothing while it plans" if planned else "has not begun to plan"
                raise self._problem(f"rank 0 {what} for {SILENCE:g} s")
            if not told and now - began > _TOLD:
                told = True
                _waits(self.rank)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return answer

    def _answer(self, ask: str) -> PlanReply | None:
        """What rank 0 has said of it, if it has."""
        key = f"{self._keys}/{ask}"
        data = self.store.get(key) if self.store.check([key]) else b""
        return PlanReply.read(data) if data else None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """FXP516 for a store that is gone."""
        try:
            yield
        except RuntimeError as cause:
            why = f"the store was lost: {str(cause).partition(chr(10))[0]}"
            raise self._problem(why) from cause

    def _problem(self, why: str) -> FxpartError:
        return error(
            "FXP516",
            where=f"rank {self.rank} of {self.world}, the plan of rank 0",
            why=why,
            fix="see what rank 0 says; call compile() on every rank, rank 0 among them",
        )


_alone = False
_latest: _PlanChannel | None = None
_opened: tuple[Launch, _PlanChannel] | None = None


def _talk(devices: int) -> _PlanChannel | None:
    """The ranks that this process is one of; None where it is alone."""
    if _alone or not dist.is_available():
        return None
    if dist.is_initialized():
        return _of_group(devices)
    try:
        found = read_launch()
    except FxpartError:  # which is told where ranks connect
        return None
    return _of_launch(found) if found is not None and 1 < found.world <= devices else None


def _of_group(devices: int) -> _PlanChannel | None:
    """Of a process group that there is already: its store."""
    global _latest
    store, world = default_store(), dist.get_world_size()
    if store is None or not 1 < world <= devices:
        return None
    if _latest is None or _latest.store is not store:
        _latest = _PlanChannel(store, dist.get_rank(), world)
    return _latest


def _of_launch(found: Launch) -> _PlanChannel | None:
    """Of torchrun's environment; the store stays open, as there is one to a process."""
    from fxpart.launch.job_store import open_store  # which a torch without them has not

    global _opened
    if _opened is not None and _opened[0] == found:
        return _opened[1]
    try:
        store = open_store(found, SILENCE if found.rank == 0 else _TOLD)
    except FxpartError:
        if found.rank == 0:  # nobody hears it, which is told where ranks connect
            return None
        _waits(found.rank)
        store = open_store(found, SILENCE - _TOLD)
    _opened = found, _PlanChannel(store, found.rank, found.world)
    return _opened[1]


def _waits(rank: int) -> None:
    _log.warning(
        "rank %d waits for the plan of rank 0, until nothing is heard of it for %g s", rank, SILENCE
    )
