"""Profiles of models under quotas that were made while the machine kept its pace.

Imported by heterogeneous_measured.py, not run. On a shared machine the same work takes half as long
again for a minute or two. Each quota's profile is of another minute, so that such a one would make
ranks of one quota slow beside those of the others. A fixed piece of work is done every few seconds
while a model is profiled; where it takes longer than it did in the best of moments, the profile is
made again, and of some the steadiest is kept.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

_APART = 2.0  # seconds between pieces of work
_WITHIN = 1.3  # of the best moment's seconds, for the slower quarter of pieces
_TRIES = 2


@dataclass
class Pieces:
    """Processor seconds of a fixed piece of work, done now and then."""

    seconds: list[float] = field(default_factory=list)
    _last: float = 0.0

    def now_and_then(self, *_: object) -> None:
        """Another one, if the last is some seconds ago: for whatever tells how far it is."""
        if time.monotonic() - self._last > _APART:
            self.seconds.append(self._piece())
            self._last = time.monotonic()

    def slow(self) -> float:
        """What the slower quarter took at least."""
        if len(self.seconds) < 2:
            return max(self.seconds, default=0.0)
        return statistics.quantiles(self.seconds, n=4)[2]

    def _piece(self) -> float:
        """Products of matrices and sums of vectors that do not fit caches; the median of some."""
        import torch

        a, b = torch.ones(256, 256), torch.ones(4 << 20)
        taken = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(8):
                torch.mm(a, a)
            b.add_(1.0)
            taken.append(time.process_time() - start)
        return statistics.median(taken)


def profile_held(
    name: str, quotas_: list[float], base: Cluster, path: Path, budget: float, say: Any
) -> dict[str, list[float]]:
    """Profile a model under each quota into one file; by quota what each try's pieces took.

    Relative to the best piece under the same quota. A quota that the file knows is passed over.
    """
    from fxpart.costmodels.profile_store import Profile

    with Profile(path) as kept:
        known = {setting.quota for setting in kept.settings()}
    told: dict[str, list[float]] = {}
    for quota in [q for q in quotas_ if q not in known]:
        tries: list[tuple[float, Path]] = []
        least = 0.0
        while len(tries) < _TRIES:
            say(f"{name}: profiled under {quota:g} cores")
            made = path.with_name(f"{path.name}-{quota:g}-{len(tries)}")
            made.unlink(missing_ok=True)
            answer = _held(name, quota, base, made, budget)
            tries.append((answer["slow"], made))
            least = min(least or answer["least"], answer["least"])
            say(f"  slow moments took {answer['slow'] / least:.2f} times what the best did")
            if min(tries)[0] <= _WITHIN * least:
                break
        told[f"{quota:g}"] = [slow / least for slow, _ in tries]
        with Profile(path) as into, Profile(min(tries)[1]) as best:
            into.merge(best)
        for _, made in tries:
            made.unlink(missing_ok=True)
    return told


def _held(name: str, quota: float, base: Cluster, path: Path, budget: float) -> dict[str, float]:
    """In a process under the quota."""
    import quotas

    from fxpart.profiling.processes import run_on_processes

    with quotas.Groups([quota]) as groups:
        payload = {
            "groups": [str(folder) for folder in groups.folders], "cores": groups.cores,
            "name": name, "quota": quota, "ranks": len(base.devices), "path": str(path),
            "budget": budget,
        }  # fmt: skip
        (found,) = run_on_processes(1, "held_profiles:measure", payload, 1800.0)
    return {key: float(value) for key, value in found.items()}


def measure(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The process that profiles."""
    import quotas
    from heterogeneous_measured import workload
    from msgspec.structs import replace

    from fxpart.cluster.model import Cluster
    from fxpart.profiling.session import profile

    del world
    work, base = workload(payload["name"]), Cluster.local(payload["ranks"])
    devices = tuple(replace(d, quota=payload["quota"], threads=1) for d in base.devices)
    quotas.enter(rank, payload)
    pieces = Pieces()
    profile(
        work, replace(base, devices=devices), payload["path"], budget=payload["budget"],
        rehearse=False, progress=pieces.now_and_then,
    )  # fmt: skip
    pieces.now_and_then()
    return {"slow": pieces.slow(), "least": min(pieces.seconds)}
