"""One plan for all ranks of a job: rank 0 plans, the others wait for its plan.

Planners with a time limit may find different plans on different processes, and ranks with different
plans cannot train. Rank 0 waits for no other rank, so that it may plan alone. All messages go
through the store of the rendezvous, before there is a process group as well as after:

    rank 0                                         rank r
    requests/n: digest of its n-th request   ->    another request? plan independently
    beat: incremented while it plans         ->    waits while it changes
                                             <-    seen/n: it has begun, after n restarts
    plan/..., errors/...: the outcome        ->    uses it
                                             <-    received/...: it has read the errors

Where a launcher keeps the store alive, restarted ranks find the plan that they had, but no errors.
"""

from __future__ import annotations

import atexit
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

_BEAT_INTERVAL = 1.0  # seconds between two heartbeats
SILENCE = 60.0  # seconds without a message from rank 0 after which the other ranks give up
_WARN_AFTER = 10.0  # seconds of waiting after which a warning is logged
_READ_TIMEOUT = 5.0  # seconds that rank 0 waits for the others to read why there is no plan
_START_TIMEOUT = 60.0  # the same at its exit, if it owns the store and others are still starting
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between polls

_log = logging.getLogger("fxpart.planner")


class PlanReply(msgspec.Struct, frozen=True):
    """The message of rank 0: the plan as text, or the errors that prevented it."""

    plan: str = ""
    problems: tuple[tuple[str, str, str, str], ...] = ()

    @classmethod
    def of_error(cls, fault: BaseException) -> PlanReply:
        """Return the reply for an error: an FxpartError's problems, FXP507 for other exceptions."""
        if isinstance(fault, FxpartError):
            return cls(problems=tuple((p.code, p.where, p.why, p.fix) for p in fault.problems))
        why = f"{type(fault).__name__}: {fault}"
        return cls(problems=(("FXP507", "rank 0", why, "see the output of rank 0"),))

    @classmethod
    def decode(cls, data: bytes) -> PlanReply:
        """Decode the data of :meth:`encode`."""
        return msgspec.json.decode(zlib.decompress(data), type=cls)

    def encode(self) -> bytes:
        """Return the compressed message; stores limit the size of values."""
        return zlib.compress(msgspec.json.encode(self))

    def get_plan(self) -> Plan:
        """Return the plan; raises the errors that rank 0 raised."""
        if self.problems:
            raise FxpartError([Problem(*each) for each in self.problems])
        return Plan.loads(self.plan, "the plan of rank 0")


def agree_on_plan(request: str, make: Callable[[], Plan], devices: int) -> Plan:
    """Return the plan that ``make`` returns on rank 0, on every rank with the same request.

    request: as text. A rank with another request makes its own plan; comparing the
    programs then raises FXP501. devices: number of devices of the cluster; a job with more
    processes does not plan together. In one process, and within :func:`plan_independently`,
    ``make`` is called.

    Raises on all ranks what rank 0 raises; FXP516 where a rank has received nothing from rank 0 for
    a minute.
    """
    channel = _find_channel(devices)
    if channel is None:
        return make()
    number, name = channel.next(request)
    if channel.rank == 0:
        return channel.publish_plan(number, name, make)
    reply = channel.wait_for_reply(number, name)
    return make() if reply is None else reply.get_plan()


def is_multi_rank_job() -> bool:
    """Return whether this process is one of several ranks of a job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    try:
        found = read_launch()
    except FxpartError:  # raised again when ranks connect
        return False
    return found is not None and found.world > 1


@contextmanager
def plan_independently() -> Iterator[None]:
    """Within this context, this process plans on its own and shares no plan."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


class _PlanChannel:
    """This rank's access to the messages about plans in one store."""

    def __init__(
        self, store: Any, rank: int, world: int, *, restarts: int = 0, owned: bool = False
    ) -> None:
        """restarts: of the job. owned: the store ends with this process."""
        self.store, self.rank, self.world = store, rank, world
        self._keys = f"fxpart/plans/{world}"
        self._seen = f"{self._keys}/seen/{restarts}"
        self._errors = f"{self._keys}/errors/{restarts}"
        self._owned = owned
        self._requests: Counter[str] = Counter()
        if rank:
            with self._raise_if_lost():
                store.add(self._seen, 1)

    def next(self, request: str) -> tuple[int, str]:
        """Return the number of earlier requests, and a name that is unique to this request."""
        number = self._requests.total()
        digest = hashlib.sha256(request.encode()).hexdigest()[:32]
        self._requests[digest] += 1
        return number, f"{digest}-{self._requests[digest]}"

    # -- rank 0 ----------------------------------------------------------------------------------

    def publish_plan(self, number: int, name: str, make: Callable[[], Plan]) -> Plan:
        """Make the plan, or use the one of an earlier run; publish the outcome to the others."""
        with self._raise_if_lost():
            self.store.set(f"{self._keys}/requests/{number}", name)
            before = self._get_reply(name)
            if before is not None and before.plan:
                return before.get_plan()
            self.store.set(f"{self._keys}/{name}", "")
        try:
            with self._send_heartbeats():
                plan = make()
        except BaseException as fault:
            with suppress(RuntimeError, ValueError):
                self._publish_error(name, fault)
            raise
        with self._raise_if_lost():
            self.store.set(f"{self._keys}/{name}", PlanReply(plan=plan.dumps()).encode())
        return plan

    def _publish_error(self, name: str, fault: BaseException) -> None:
        """Publish why there is no plan to the ranks of this run only; a restart may succeed.

        Waits for the others to read it, as this process may exit because of it, and the store with
        it. Ranks that have not begun yet are waited for at the exit, so that this rank's error is
        seen at once.
        """
        self.store.set(f"{self._errors}/{name}", PlanReply.of_error(fault).encode())
        if not isinstance(fault, Exception):
            return
        self._wait_for_readers(name, _READ_TIMEOUT)
        if self._owned and self.store.add(self._seen, 0) < self.world - 1:
            atexit.register(self._wait_at_exit, name)

    def _wait_for_readers(self, name: str, seconds: float) -> None:
        limit = time.monotonic() + seconds
        received = f"{self._keys}/received/{name}"
        while time.monotonic() < limit and self.store.add(received, 0) < self.world - 1:
            time.sleep(_LONGEST_PAUSE)

    def _wait_at_exit(self, name: str) -> None:
        """Keep the store until ranks that start late have read the errors."""
        _log.warning(
            "rank 0 keeps the store for up to %g s, for ranks that have not begun", _START_TIMEOUT
        )
        with suppress(RuntimeError):
            self._wait_for_readers(name, _START_TIMEOUT)

    @contextmanager
    def _send_heartbeats(self) -> Iterator[None]:
        """Publish heartbeats while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):
                while not ended.wait(_BEAT_INTERVAL):
                    self.store.add(f"{self._keys}/beat", 1)

        thread = threading.Thread(target=beat, name="fxpart-planning", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # -- the other ranks -------------------------------------------------------------------------

    def wait_for_reply(self, number: int, name: str) -> PlanReply | None:
        """Return the reply of rank 0; None where it plans for another request. Raises FXP516."""
        with self._raise_if_lost():
            reply = self._poll(f"{self._keys}/requests/{number}", name)
            if reply is not None and reply.problems:
                self.store.add(f"{self._keys}/received/{name}", 1)
            return reply

    def _poll(self, request_key: str, name: str) -> PlanReply | None:
        began = received = time.monotonic()
        last: tuple[bytes, int] | None = None
        warned, pause = False, _FIRST_PAUSE
        while (reply := self._get_reply(name)) is None:
            planned = self.store.get(request_key) if self.store.check([request_key]) else b""
            if planned not in (b"", name.encode()):
                return None
            state, now = (planned, self.store.add(f"{self._keys}/beat", 0)), time.monotonic()
            if state != last:
                last, received = state, now
            if now - received > SILENCE:
                status = (
                    "has sent no heartbeat while it plans" if planned else "has not begun to plan"
                )
                raise self._problem(f"rank 0 {status} for {SILENCE:g} s")
            if not warned and now - began > _WARN_AFTER:
                warned = True
                _log_waiting(self.rank)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return reply

    def _get_reply(self, name: str) -> PlanReply | None:
        """Return the reply of rank 0 to this request; None where there is none yet."""
        for key in (f"{self._keys}/{name}", f"{self._errors}/{name}"):
            data = self.store.get(key) if self.store.check([key]) else b""
            if data:
                return PlanReply.decode(data)
        return None

    @contextmanager
    def _raise_if_lost(self) -> Iterator[None]:
        """Raise FXP516 where the store is lost."""
        try:
            yield
        except RuntimeError as cause:
            why = f"the store was lost: {str(cause).partition(chr(10))[0]}"
            raise self._problem(why) from cause

    def _problem(self, why: str) -> FxpartError:
        return error(
            "FXP516",
            where=f"rank {self.rank} of {self.world}, waiting for the plan of rank 0",
            why=why,
            fix="see the output of rank 0; call compile() on every rank, including rank 0",
        )


_alone = False
_latest: _PlanChannel | None = None
_opened: tuple[Launch, _PlanChannel] | None = None


def _find_channel(devices: int) -> _PlanChannel | None:
    """Return the channel to the ranks of this job; None where this process is alone."""
    if _alone or not dist.is_available():
        return None
    if dist.is_initialized():
        return _open_for_group(devices)
    try:
        found = read_launch()
    except FxpartError:  # raised again when ranks connect
        return None
    return _open_for_launch(found) if found is not None and 1 < found.world <= devices else None


def _open_for_group(devices: int) -> _PlanChannel | None:
    """Return the channel through the store of an existing process group."""
    global _latest
    store, world = default_store(), dist.get_world_size()
    if store is None or not 1 < world <= devices:
        return None
    if _latest is None or _latest.store is not store:
        _latest = _PlanChannel(store, dist.get_rank(), world)
    return _latest


def _open_for_launch(found: Launch) -> _PlanChannel | None:
    """Return the channel for torchrun's environment; one store per process stays open."""
    from fxpart.launch.job_store import open_store  # needs torch with distributed

    global _opened
    if _opened is not None and _opened[0] == found:
        return _opened[1]
    try:
        store = open_store(found, SILENCE if found.rank == 0 else _WARN_AFTER)
    except FxpartError:
        if found.rank == 0:  # no rank can connect; raised again when ranks connect
            return None
        _log_waiting(found.rank)
        store = open_store(found, SILENCE - _WARN_AFTER)
    _opened = found, _PlanChannel(
        store, found.rank, found.world, restarts=found.restarts,
        owned=found.rank == 0 and not found.keeps_store,
    )  # fmt: skip
    return _opened[1]


def _log_waiting(rank: int) -> None:
    _log.warning(
        "rank %d waits for the plan of rank 0; gives up after %g s without a heartbeat",
        rank,
        SILENCE,
    )
