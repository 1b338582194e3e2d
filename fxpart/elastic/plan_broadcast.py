"""One plan for the ranks started by torchrun: rank 0 finds or makes it, and broadcasts it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from fxpart.cluster.model import Cluster
from fxpart.elastic.available_cluster import adapt_cluster_to_ranks
from fxpart.environment import Launch
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.planner.plan_agreement import PlanReply, plan_independently
from fxpart.runtime.transport.rendezvous import join_rendezvous

_PLAN = "fxpart/plan"


def broadcast_plan(
    found: Launch, make: Callable[[Sequence[str]], Plan], *, timeout: float = 60.0
) -> Plan:
    """Return the plan that ``make`` returns on rank 0, on every rank; errors are raised on all.

    make: receives the host name of each rank. timeout: seconds for the rendezvous; the plan itself
    is awaited ten times as long, because the model is captured and solved meanwhile. FXP516 if the
    ranks do not meet.
    """
    rendezvous = join_rendezvous(found, timeout)
    store, names = rendezvous.store, [f"fxpart/host/{rank}" for rank in range(found.world)]
    limit = timedelta(seconds=10 * timeout)
    try:
        store.set(names[found.rank], socket.gethostname())
        if found.rank == 0:
            store.wait(names, limit)
            return _make_and_publish(store, make, [raw.decode() for raw in store.multi_get(names)])
        store.wait([_PLAN], limit)
        answer = PlanReply.decode(store.get(_PLAN))
    except RuntimeError as cause:
        raise error(
            "FXP516",
            where=f"rank {found.rank} of {found.world}, generation {rendezvous.generation}",
            why=f"rank 0 has not provided a plan within {10 * timeout:g} s",
            fix="see the messages of rank 0",
        ) from cause
    return answer.get_plan()


def _make_and_publish(
    store: Any, make: Callable[[Sequence[str]], Plan], hosts: Sequence[str]
) -> Plan:
    """Make the plan, and publish the plan or the error."""
    try:
        with plan_independently():
            plan = make(hosts)
    except BaseException as fault:
        store.set(_PLAN, PlanReply.of_error(fault).encode())
        raise
    store.set(_PLAN, PlanReply(plan=plan.dumps()).encode())
    return plan


def match_cluster_to_hosts(given: str, hosts: Sequence[str]) -> Cluster:
    """Return the available cluster, with rank r on the host ``hosts[r]``.

    given: as on the command line. If the cluster names these hosts, its devices are those of the
    ranks in their order, without other hosts. Otherwise it is the result of
    :func:`~fxpart.elastic.available_cluster.adapt_cluster_to_ranks`; "auto" is what torchrun
    started.
    """
    if given == "auto":
        return Cluster.parse("auto")
    cluster = Cluster.parse(given)
    free = {host: [d for d in cluster.devices if d.host == host] for host in set(hosts)}
    if any(hosts.count(host) > len(devices) for host, devices in free.items()):
        return adapt_cluster_to_ranks(given, len(hosts))
    devices = tuple(free[host].pop(0) for host in hosts)
    left = adapt_cluster_to_ranks(
        given, len(hosts), [d.name for d in cluster.devices if d not in devices]
    )
    return msgspec.structs.replace(left, devices=devices)
