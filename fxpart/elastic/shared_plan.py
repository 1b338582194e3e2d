"""One plan for the ranks that torchrun started: rank 0 finds or makes it, and gives it to all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from fxpart.cluster import Cluster
from fxpart.elastic.clusters import for_ranks
from fxpart.environment import Launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan import Plan
from fxpart.runtime.generation import meet

_PLAN = "fxpart/plan"


class _Answer(msgspec.Struct, frozen=True):
    """What rank 0 says: the plan's text, or why there is none."""

    plan: str = ""
    problems: tuple[tuple[str, str, str, str], ...] = ()


def shared_plan(
    found: Launch, make: Callable[[Sequence[str]], Plan], *, timeout: float = 60.0
) -> Plan:
    """The plan that ``make`` gives on rank 0, on every rank; what it raises is raised on all.

    make: is given the name of each rank's machine. timeout: seconds to meet in; as the model is
    captured and solved meanwhile, the plan itself is waited for ten times as long. FXP516 where the
    ranks do not meet.
    """
    meeting = meet(found, timeout)
    store, names = meeting.store, [f"fxpart/host/{rank}" for rank in range(found.world)]
    limit = timedelta(seconds=10 * timeout)
    try:
        store.set(names[found.rank], socket.gethostname())
        if found.rank == 0:
            store.wait(names, limit)
            return _made(store, make, [raw.decode() for raw in store.multi_get(names)])
        store.wait([_PLAN], limit)
        answer = msgspec.json.decode(store.get(_PLAN), type=_Answer)
    except RuntimeError as cause:
        raise error(
            "FXP516",
            where=f"rank {found.rank} of {found.world}, generation {meeting.generation}",
            why=f"rank 0 has given no plan within {10 * timeout:g} s",
            fix="see what rank 0 says",
        ) from cause
    if answer.problems:
        raise FxpartError([Problem(*each) for each in answer.problems])
    return Plan.loads(answer.plan, "the plan of rank 0")


def _made(store: Any, make: Callable[[Sequence[str]], Plan], hosts: Sequence[str]) -> Plan:
    """Make the plan, and tell the others whatever comes of it."""
    try:
        plan = make(hosts)
        answer = _Answer(plan=plan.dumps())
    except FxpartError as fault:
        rows = tuple((p.code, p.where, p.why, p.fix) for p in fault.problems)
        store.set(_PLAN, msgspec.json.encode(_Answer(problems=rows)))
        raise
    except BaseException as fault:
        why = f"{type(fault).__name__}: {fault}"
        row = ("FXP507", "rank 0", why, "see what rank 0 says")
        store.set(_PLAN, msgspec.json.encode(_Answer(problems=(row,))))
        raise
    store.set(_PLAN, msgspec.json.encode(answer))
    return plan


def of_hosts(given: str, hosts: Sequence[str]) -> Cluster:
    """The cluster that is there, where rank r is on the machine ``hosts[r]``.

    given: as on the command line. Where the cluster names these machines, its devices are those of
    the ranks in their order, and machines that are not there are left out. Else it is what
    :func:`~fxpart.elastic.clusters.for_ranks` makes of it; "auto" is what torchrun started.
    """
    if given == "auto":
        return Cluster.parse("auto")
    cluster = Cluster.parse(given)
    free = {host: [d for d in cluster.devices if d.host == host] for host in set(hosts)}
    if any(hosts.count(host) > len(devices) for host, devices in free.items()):
        return for_ranks(given, len(hosts))
    devices = tuple(free[host].pop(0) for host in hosts)
    left = for_ranks(given, len(hosts), [d.name for d in cluster.devices if d not in devices])
    return msgspec.structs.replace(left, devices=devices)
