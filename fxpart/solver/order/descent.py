"""Local search over orders: swap adjacent jobs on the critical path, as for job shops.

A step ends when its critical path does; only a swap of two adjacent jobs of one rank on that path
can shorten it (van Laarhoven, Aarts and Lenstra, Operations Research 1992). Tabu moves let the
search leave local optima.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

from fxpart.solver.order.jobs import Jobs, JobTimes, Orders
from fxpart.solver.work import work_seconds

_TINY = 1e-12


def improve_orders(
    jobs: Jobs, orders: Orders, bound: float, *, tries: int, deadline: float, seed: int
) -> tuple[Orders, float]:
    """Return the best orders found, and their seconds; at least as good as the given valid orders.

    bound: where to stop. tries: maximum number of evaluations. deadline: a ``work_seconds()``
    value.
    """
    now = jobs.timed(orders)
    assert now is not None, "the initial orders are valid"
    rng = random.Random(seed)
    best, seconds = [list(mine) for mine in orders], now.seconds
    orders = [list(mine) for mine in orders]
    tabu: deque[tuple[int, int]] = deque(maxlen=8 + len(jobs.action) // 20)
    while tries > 0 and seconds > bound * (1 + 1e-9) and work_seconds() < deadline:
        moves = _moves(jobs, orders, now)
        rng.shuffle(moves)
        chosen: tuple[float, int, int, JobTimes] | None = None
        for rank, place in moves:
            mine = orders[rank]
            pair = (mine[place + 1], mine[place])
            mine[place], mine[place + 1] = pair
            tries -= 1
            timed = jobs.timed(orders) if jobs.fits(orders) else None
            mine[place], mine[place + 1] = pair[::-1]
            if timed is None or (pair in tabu and timed.seconds >= seconds - _TINY):
                continue
            if chosen is None or timed.seconds < chosen[0] - _TINY:
                chosen = (timed.seconds, rank, place, timed)
        if chosen is None:
            break
        _, rank, place, now = chosen
        mine = orders[rank]
        tabu.append((mine[place], mine[place + 1]))
        mine[place], mine[place + 1] = mine[place + 1], mine[place]
        if now.seconds < seconds - _TINY:
            best, seconds = [list(each) for each in orders], now.seconds
    return best, seconds


def _moves(jobs: Jobs, orders: Orders, timed: JobTimes) -> list[tuple[int, int]]:
    """Return (rank, position) of adjacent jobs on a critical path that may be swapped."""
    critical = _critical(jobs, orders, timed)
    found = []
    for rank, mine in enumerate(orders):
        for place in range(len(mine) - 1):
            one, other = mine[place], mine[place + 1]
            if not (critical[one] and critical[other]):
                continue
            if timed.start[other] > timed.end[one] + _TINY or one in jobs.needs[other]:
                continue
            a, b = jobs.action[one], jobs.action[other]
            if (a.stage, a.kind) != (b.stage, b.kind):
                found.append((rank, place))
    return found


def _critical(jobs: Jobs, orders: Orders, timed: JobTimes) -> list[bool]:
    """Return which jobs are critical: their delay lengthens the step; link queues are ignored."""
    count = len(jobs.action)
    latest = [timed.seconds] * count
    behind = {one: other for mine in orders for one, other in pairwise(mine)}
    for job in sorted(range(count), key=lambda j: (timed.start[j], timed.end[j], j), reverse=True):
        for target, seconds, link in jobs.sends[job]:
            moved = seconds if link is not None else 0.0
            latest[job] = min(latest[job], latest[target] - jobs.seconds[target] - moved)
        if job in behind:
            other = behind[job]
            latest[job] = min(latest[job], latest[other] - jobs.seconds[other])
    return [timed.end[j] >= latest[j] - 1e-9 * timed.seconds for j in range(count)]
