"""Cache of a run's plans by cluster and number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from fxpart.checkpoint.run_directory import RunDir, make_unwritable_error
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError, error
from fxpart.files import from_json, read_bytes
from fxpart.plan.model import Plan

KEY_FILE = "asked.json"
_MOST_BYTES = 1 << 20


class PlanCacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of planning, except the number of ranks.

    constraints: all but the number of ranks. cost_model: name, or digest of its file. version: of
    fxpart, because another one may plan differently. The global batch and the microbatches are not
    included: the run's first plan fixes them (:func:`check_same`).
    """

    target: str
    constraints: dict[str, int | float | str | bool] = {}
    optimizer: str | None = None
    cost_model: str = "auto"
    seed: int = 0
    version: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in hex."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class PlanCache:
    """Plans in ``RunDir.plans``; plans made from other inputs are never returned.

    A plan's file is ``<fingerprint>-<cluster hash>-<ranks>.json``, as a cluster may have more
    devices than a plan uses. Processes may read and write concurrently: files are written
    atomically.
    """

    def __init__(self, run: RunDir, cache_key: PlanCacheKey) -> None:
        """Open the cache, and clear it if it is for other inputs. FXP603."""
        self.run = run
        if _read_key_digest(run.plans / KEY_FILE) == cache_key.digest:
            return
        try:
            run.plans.mkdir(parents=True, exist_ok=True)
            for old in run.plans.glob("*-*.json"):
                old.unlink(missing_ok=True)
            write_atomically(
                run.plans / KEY_FILE,
                msgspec.json.encode({"digest": cache_key.digest, "asked": cache_key}),
            )
        except OSError as why:
            raise make_unwritable_error(run.plans, why) from why

    def path(self, fingerprint: str, cluster: Cluster, ranks: int) -> Path:
        """Return the file of the plan for this model, cluster and number of ranks."""
        return self.run.plans / f"{fingerprint}-{cluster.hash}-{ranks}.json"

    def find(self, cluster: Cluster, ranks: int) -> Plan | None:
        """Return the plan for this number of ranks of the cluster, or None.

        Unreadable files are ignored. The model is that of the run's newest plan; every rank
        compares its graph when it applies the plan (FXP304).
        """
        found = []
        for path in sorted(self.run.plans.glob(f"*-{cluster.hash}-{ranks}.json")):
            try:
                plan = Plan.load(path)
            except FxpartError:
                path.unlink(missing_ok=True)  # incomplete file: it is made again
                continue
            if plan.world == ranks and plan.cluster_hash == cluster.hash:
                found.append(plan)
        if len(found) > 1:
            current = load_newest_plan(self.run)
            found = [p for p in found if current and _same_model(p, current)]
        return found[0] if found else None

    def keep(self, plan: Plan) -> Path:
        """Write the plan where :meth:`find` looks. FXP603."""
        path = self.path(plan.model.fingerprint, plan.cluster, plan.world)
        plan.dump(path)
        return path


def find_or_make_plan(
    plans: PlanCache, cluster: Cluster, ranks: int, make: Callable[[], Plan]
) -> tuple[Plan, bool]:
    """Return the plan for this number of ranks, and whether it was in the cache; else make it.

    Raises what ``make`` raises, and FXP109 if the plan violates :func:`check_same`.
    """
    found = plans.find(cluster, ranks)
    plan = found if found is not None else make()
    before = load_newest_plan(plans.run)
    if before is not None:
        check_same(plan, before, str(plans.run.path))
    if found is None:
        plans.keep(plan)
    return plan, found is not None


def load_newest_plan(run: RunDir) -> Plan | None:
    """Return the plan of the run's newest generation, or None if it cannot be read."""
    try:
        return Plan.load(run.plan)
    except FxpartError:
        return None


def check_same(plan: Plan, before: Plan, where: str) -> None:
    """Check that the plan's updates equal those of the run's plan ``before``, for any ranks.

    FXP109 if the global batch, microbatches, weight mode, precision or optimizer differ, as each of
    them changes the results. Another number of asynchronous stages also changes the results,
    because forwards miss more updates; that is accepted for an asynchronous run.
    """
    rows = [
        (name, getattr(before, name), getattr(plan, name))
        for name in (
            "batch_size", "microbatches", "weights", "precision", "transfer_dtype", "optimizer",
            "seed",
        )
        if getattr(before, name) != getattr(plan, name)
    ]  # fmt: skip
    if rows:
        name, was, now = rows[0]
        raise error(
            "FXP109",
            where=f"--run {where}",
            why=f"the run has {name.replace('_', ' ')} {was!r}, but {now!r} is requested, which "
            "changes its results",
            fix=f"use {was!r}, or start a run in another folder",
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file by renaming a temporary one, so that a reader never sees half of it. OSError."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(data)
    beside.replace(path)


def _read_key_digest(path: Path) -> str:
    """Return the digest of the folder's inputs, or "" if unknown."""
    try:
        return str(from_json(read_bytes(path, _MOST_BYTES)).get("digest", ""))
    except (OSError, ValueError, RecursionError, AttributeError, msgspec.MsgspecError):
        return ""


def _same_model(one: Plan, other: Plan) -> bool:
    return one.model.fingerprint == other.model.fingerprint
