"""Measure the CPU contention of a host's ranks and the actual rates of its devices.

The computation is a mixture like that of a stage: matrix products of a transformer block, pointwise
ops over a few megabytes, a softmax, and their backward. 1, 2, ... ranks run it at the same time,
each for the same time window, so that none is alone at the end. Rounds are interleaved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fxpart.accelerator import synchronize
from fxpart.cluster.host_detection import cores
from fxpart.profiling.outliers import typical
from fxpart.profiling.processes import report_progress
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.transport.interface import FORWARD, Route
from fxpart.runtime.transport.process_group import connect
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

TARGET = "fxpart.profiling.host_benchmark:measure"

_LEAST = 3
_MOST = 30
_WINDOW = 0.3  # Seconds that ranks compute at the same time.
_RATE_WINDOW = 0.15
_SIDE = 512  # Size of the square matrices whose product gives the rate of a dtype.
_COPIED = 1 << 26  # Bytes of a tensor whose copy gives the memory bandwidth; larger than caches.
_MESSAGE = 1 << 22  # Bytes of the transfers while another rank computes.


@dataclass(frozen=True)
class HostFigures:
    """Measurements of one host.

    slowdown: factors by which computation slows down while 1, 2, ... ranks compute. transfer:
    number of computing ranks that is equivalent to a transfer between two ranks, 0 to 2; None with
    fewer than three ranks. rates: of each rank while all compute, FLOP/s by dtype, and bytes/s as
    "bandwidth". cores: available to a rank.
    """

    slowdown: tuple[float, ...]
    transfer: float | None
    rates: dict[str, float]
    cores: int


def request(
    hosts: Sequence[str],
    *,
    budget: float = 30.0,
    dtypes: Sequence[str] = ("float32",),
    device: str = "cpu",
    least: int = _LEAST,
    window: float = _WINDOW,
    devices: int | None = None,
) -> dict[str, Any]:
    """Return the payload of :func:`measure`.

    hosts: host of each rank. budget, window: seconds. least: rounds. devices: number of ranks that
    have a device; later ranks only take part in the measurement of transfers.
    """
    return {
        "hosts": list(hosts),
        "budget": budget,
        "dtypes": list(dtypes),
        "device": device,
        "least": least,
        "window": window,
        "devices": len(hosts) if devices is None else devices,
    }


def measure(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank: time the mixture in each round, for each number of computing ranks.

    Hosts measure at the same time. Result: "busy" [count - 1][round] (None while this rank waits),
    "beside" [round] (third rank of a host during transfers of the others), "rates", "cores".
    """
    device = local_device(payload["device"])
    transport = connect(world, device=payload["device"])
    assert isinstance(transport, ProcessGroupTransport)
    hosts = payload["hosts"]
    mine = [r for r in range(world) if hosts[r] == hosts[rank]]
    place, most = mine.index(rank), max(hosts.count(host) for host in hosts)
    transport.open(_find_routes(hosts), device)
    mixture = SyntheticBlock(device)
    rates = _rates(payload["dtypes"], device, transport, rank < payload["devices"])
    busy: list[list[float | None]] = [[] for _ in range(most)]
    beside: list[float] = []
    for number in _rounds(transport, payload):
        for count in range(1, most + 1):
            transport.exchange([0])
            # Smaller hosts take part as long as they have ranks.
            active = place < count <= len(mine)
            took = window(mixture, payload["window"]) if active else None
            if number:
                busy[count - 1].append(took)
        transport.exchange([0])
        if len(mine) > 2 and place < 3:
            took = _time_beside_transfers(
                transport, mine[:3], place, mixture, payload["window"], device
            )
            if number and took is not None:
                beside.append(took)
        if rank == 0:
            report_progress(payload, f"ranks that share a host, round {number}")
    transport.close()
    return {"busy": busy, "beside": beside, "rates": rates, "cores": cores()}


def results(
    payload: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> dict[str, HostFigures]:
    """Return figures by host: medians over rounds, relative to a single rank in the same round."""
    found = {}
    for host in dict.fromkeys(payload["hosts"]):
        here = [answer for answer, of in zip(answers, payload["hosts"], strict=True) if of == host]
        alone = here[0]["busy"][0]
        slowdown = []
        for count in range(1, len(here) + 1):
            rounds = zip(*(answer["busy"][count - 1] for answer in here[:count]), strict=True)
            means = [sum(taken) / count for taken in rounds]
            slowdown.append(typical([m / a for m, a in zip(means, alone, strict=True)]))
        transfer = None
        if len(here) > 2 and here[2]["beside"]:
            ratios = [b / a for b, a in zip(here[2]["beside"], alone, strict=True)]
            transfer = count_equivalent_ranks(typical(ratios), slowdown)
        rated = [answer["rates"] for answer in here if answer["rates"]]
        rates = {name: typical([each[name] for each in rated]) for name in rated[0]}
        curve = make_monotonic(slowdown)[: len(rated)]
        found[host] = HostFigures(curve, transfer, rates, here[0]["cores"])
    return found


def make_monotonic(slowdown: Sequence[float]) -> tuple[float, ...]:
    """Return the curve made monotonic, starting at 1, as more ranks are never faster."""
    result: list[float] = []
    for value in slowdown:
        result.append(max(value, result[-1]) if result else 1.0)
    return tuple(result)


def count_equivalent_ranks(factor: float, slowdown: Sequence[float]) -> float:
    """Return the number of additional ranks, 0 to 2, that cause the slowdown ``factor``."""
    curve = make_monotonic(slowdown)
    for count in range(1, len(curve)):
        low, high = curve[count - 1], curve[count]
        if factor <= high:
            share = (factor - low) / (high - low) if high > low else 0.0
            return min(2.0, max(0.0, count - 1 + share))
    return min(2.0, float(len(curve) - 1))


class SyntheticBlock:
    """Forward and backward of a block: matrix products, pointwise ops, a softmax, a norm."""

    def __init__(self, device: torch.device, rows: int = 128, width: int = 512) -> None:
        """rows: tokens. width: of the block; its inner layer is four times as wide."""
        make = torch.Generator().manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make).mul_(0.02).to(device).requires_grad_()

        self.x, self.scores = made(rows, width), made(8, rows, rows)
        self.up, self.down = made(4 * width, width), made(width, 4 * width)
        self.device = device

    def __call__(self) -> None:
        """Run forward and backward once, with new gradients."""
        inner = F.gelu(F.linear(F.layer_norm(self.x, self.x.shape[-1:]), self.up))
        out = self.x + F.linear(inner, self.down)
        loss = out.square().mean() + (self.scores.softmax(-1) * self.scores).mean()
        torch.autograd.grad(loss, (self.x, self.scores, self.up, self.down))
        synchronize(self.device)


def window(work: Callable[[], object], seconds: float) -> float:
    """Return the mean seconds of a call of ``work`` over a time window.

    This is the mean and not the median, as ranks that share a core are slow only in some calls.
    """
    start, taken, calls = time.perf_counter(), 0.0, 0
    while taken < seconds or not calls:
        work()
        calls += 1
        taken = time.perf_counter() - start
    return taken / calls


def _rounds(transport: ProcessGroupTransport, payload: Mapping[str, Any]) -> Iterator[int]:
    """Yield round numbers, equal on all ranks, until the first rank's budget is used."""
    start = time.monotonic()
    for number in range(_MOST + 1):
        used = time.monotonic() - start
        over = used * (number + 1) / max(1, number) > payload["budget"]
        stop = number > payload["least"] and over
        if transport.exchange([int(stop)])[0][0]:
            return
        yield number


def _find_routes(hosts: Sequence[str]) -> list[Route]:
    """Return the routes of the measured transfers: between the first two ranks of each host."""
    found = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, of in enumerate(hosts) if of == host]
        if len(ranks) > 2:
            found.append(Route(ranks[0], ranks[1], FORWARD))
    return found


def _time_beside_transfers(
    transport: ProcessGroupTransport,
    ranks: Sequence[int],
    place: int,
    mixture: SyntheticBlock,
    seconds: float,
    device: torch.device,
) -> float | None:
    """Time the third rank while the first two communicate without pause; None on these."""
    if place == 2:
        return window(mixture, seconds)
    a, b = ranks[:2]
    shape, end = (_MESSAGE // 4,), time.monotonic() + seconds
    last = False
    while not last:
        if place == 0:
            last = time.monotonic() >= end
            message = torch.full(shape, float(last), device=device)
            transport.wait(transport.send(a, b, FORWARD, message))
        else:
            posted = transport.post(a, b, FORWARD, shape, torch.float32, device)
            last = bool(transport.wait(posted)[0])
    return None


def _rates(
    dtypes: Sequence[str], device: torch.device, transport: ProcessGroupTransport, counts: bool
) -> dict[str, float]:
    """Return FLOP/s by dtype and bytes/s of a copy, measured on all ranks at the same time."""

    def settled(work: Callable[[], object]) -> Callable[[], object]:
        def done() -> None:
            work()
            synchronize(device)

        return done

    side = _SIDE if device.type == "cpu" else 16 * _SIDE
    rates: dict[str, float] = {}
    if not counts:
        for _ in range(len(dtypes) + 1):
            transport.exchange([0])
        return rates
    for name in dtypes:
        a = torch.ones(side, side, dtype=getattr(torch, name), device=device)
        product = settled(partial(torch.mm, a, a, out=torch.empty_like(a)))
        product()
        transport.exchange([0])
        rates[name] = 2 * side**3 / window(product, _RATE_WINDOW)
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.ones_like(source)
    transport.exchange([0])
    rates["bandwidth"] = 2 * _COPIED / window(settled(lambda: target.copy_(source)), _RATE_WINDOW)
    return rates
