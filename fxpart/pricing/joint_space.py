"""The search space of the joint planner: degrees, ZeRO levels and recompute modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.pricing.variants import splits
from fxpart.solver.problem import RECOMPUTE_MODES, Recompute

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

SMALL = 16  # number of devices up to which every degree is tried
MOST_TENSOR = 64  # largest tensor degree that is tried on more devices
LONG = 8192  # tokens from which sequences are sharded without request
MOST_COUNTS = 32  # most microbatch counts of a large batch


@dataclass(frozen=True)
class SearchSpace:
    """The allowed choices; None means the planner's default for the cluster and the model.

    tensor: ranks that share each block. context: ranks that share sequences. data: replicas of a
    stage. expert: replicas over which the experts of a mixture are distributed; with
    ``all_replicas``, over all or none. zero: levels 0 to 3. shard_degree: replicas that share the
    shards of ZeRO under hybrid sharding, tried beside the most on one host. recompute: modes.
    uniform: every stage has equal degrees. max_stages: None for as many as there are devices and
    blocks. microbatches: counts. most_options: options of a stage, of all pools together; where
    there are more, hybrid sharding and then the data degrees farthest from powers of two are
    removed first.
    """

    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    shard_degree: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = RECOMPUTE_MODES
    uniform: bool = False
    all_replicas: bool = False
    max_stages: int | None = None
    microbatches: tuple[int, ...] | None = None
    most_options: int = 2048

    def __post_init__(self) -> None:
        """Raise FXP109 for an invalid degree, level or mode."""
        degrees = (self.tensor, self.context, self.data, self.expert, self.microbatches)
        numbers = [n for row in degrees for n in row or (1,)]
        wrong = [n for n in numbers if n < 1] + [z for z in self.zero if z not in range(4)]
        modes = [mode for mode in self.recompute if mode not in RECOMPUTE_MODES]
        empty = not (self.zero and self.recompute) or any(row == () for row in degrees)
        if wrong or modes or empty or (self.max_stages or 1) < 1 or self.most_options < 1:
            raise error(
                "FXP109",
                where=f"{self}"[:200],
                why="a degree is below 1, a ZeRO level or a recompute mode is unknown, or a field "
                "is empty",
                fix="use degrees from 1, zero from 0 to 3, recompute none, selective or full",
            )


def tensor_degrees(host: int, devices: int) -> tuple[int, ...]:
    """Return the tensor degrees to try.

    host: number of devices that equal links join; devices: of the pool. All up to ``SMALL``
    devices; beyond, the divisors of a host and the powers of two, up to ``MOST_TENSOR``.
    """
    if devices <= SMALL:
        return tuple(range(1, host + 1))
    most = min(host, MOST_TENSOR)
    powers = {1 << k for k in range(most.bit_length())}
    return tuple(t for t in range(1, most + 1) if host % t == 0 or t in powers)


def context_degrees(tokens: int, host: int, devices: int) -> tuple[int, ...]:
    """Return the degrees to try for sequences of ``tokens``: divisors, as for tensor parallelism.

    1 for sequences shorter than ``LONG``, whose attention is a small part of the work.
    """
    if tokens < LONG:
        return (1,)
    return tuple(c for c in tensor_degrees(host, devices) if tokens % c == 0)


def data_degrees(devices: int) -> tuple[int, ...]:
    """Return all up to ``SMALL`` devices; beyond, 2^k, 3 * 2^k, and divisors."""
    if devices <= SMALL:
        return tuple(range(1, devices + 1))
    found = {d for d in range(1, int(devices**0.5) + 1) if devices % d == 0}
    found |= {devices // d for d in found}
    return tuple(sorted(found.union(_smooth(devices))))


def expert_degrees(experts: int, devices: int) -> tuple[int, ...]:
    """Return the divisors of the number of experts up to ``devices``; 1 for none.

    On more than ``SMALL`` devices 1 and the powers of two from 8 on.
    """
    found = [e for e in range(1, min(experts, devices) + 1) if experts % e == 0]
    if devices > SMALL:
        found = [e for e in found if e == 1 or (e >= 8 and odd(e) == 1)]
    return tuple(found) or (1,)


def microbatch_counts(batch: int, stages: int) -> tuple[int, ...]:
    """Return the counts of microbatches to try; for a small batch one of each size.

    For a large one 2^k, 3 * 2^k, and divisors of the batch.
    """
    if batch <= 64:
        return tuple(sorted({split.microbatches for split in splits(batch, stages)}))
    divisors = {d for d in range(1, batch + 1) if batch % d == 0} if batch <= 1 << 20 else set()
    found = list(dict.fromkeys([1, batch, *_smooth(batch), *sorted(divisors)]))
    return tuple(sorted(found[:MOST_COUNTS]))


def host_size(cluster: Cluster) -> int:
    """Return the most common number of devices on a host, by devices; of equal ones the larger."""
    hosts = Counter(device.host for device in cluster.devices)
    sizes: Counter[int] = Counter()
    for count in hosts.values():
        sizes[count] += count
    return max(sizes, key=lambda size: (sizes[size], size))


def odd(degree: int) -> int:
    """Return the odd part of a degree; it is small for degrees near powers of two."""
    while degree % 2 == 0:
        degree //= 2
    return degree


def _smooth(limit: int) -> Iterable[int]:
    powers = [1 << k for k in range(limit.bit_length())]
    return [p for p in sorted({*powers, *(3 * p for p in powers)}) if p <= limit]
