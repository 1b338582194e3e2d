"""The plans of a run, by what they are for: made in advance, found when ranks go or come back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from fxpart.checkpoint.run_directory import RunDir
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError, error
from fxpart.files import from_json, read_bytes
from fxpart.plan.model import Plan

ASKED = "asked.json"
_MOST_BYTES = 1 << 20


class PlanCacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """What plans of a run are asked for, whatever their number of ranks.

    constraints: all but the number of ranks. cost_model: its name, or the digest of its file.
    version: of fxpart, as another one may plan otherwise. The global batch and the microbatches
    are not asked for: the run's first plan fixes them for those that follow (:func:`check_same`).
    """

    target: str
    constraints: dict[str, int | float | str | bool] = {}
    optimizer: str | None = None
    cost_model: str = "auto"
    seed: int = 0
    version: str = ""

    @property
    def digest(self) -> str:
        """Of everything, in hex."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class PlanCache:
    """Plans in ``RunDir.plans``; those that were made for other wishes are never found.

    A plan's file is ``<fingerprint>-<cluster hash>-<ranks>.json``: a cluster may have more devices
    than a plan takes. Processes may read and write at once: a file appears whole, or not.
    """

    def __init__(self, run: RunDir, asked: PlanCacheKey) -> None:
        """Take what is there, or begin anew where something else was asked for. FXP603."""
        self.run = run
        if _asked_digest(run.plans / ASKED) == asked.digest:
            return
        try:
            run.plans.mkdir(parents=True, exist_ok=True)
            for old in run.plans.glob("*-*.json"):
                old.unlink(missing_ok=True)
            write_atomically(
                run.plans / ASKED, msgspec.json.encode({"digest": asked.digest, "asked": asked})
            )
        except OSError as why:
            raise _unwritable(run.plans, why) from why

    def path(self, fingerprint: str, cluster: Cluster, ranks: int) -> Path:
        """Where the plan for that model, cluster and number of ranks stands."""
        return self.run.plans / f"{fingerprint}-{cluster.hash}-{ranks}.json"

    def find(self, cluster: Cluster, ranks: int) -> Plan | None:
        """The plan for so many ranks of the cluster; None where there is none.

        A file that cannot be read is none. The model is the one that the run's newest plan is for,
        whose graph every rank compares when it applies the plan (FXP304).
        """
        found = []
        for path in sorted(self.run.plans.glob(f"*-{cluster.hash}-{ranks}.json")):
            try:
                plan = Plan.load(path)
            except FxpartError:
                path.unlink(missing_ok=True)  # half a disk's work; it is made again
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
    """The plan for so many ranks, and whether it was found; ``make`` plans where it was not.

    Raises what ``make`` raises, FXP109 where the plan does not keep to :func:`check_same`.
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
    """The plan of the run's newest generation; None where there is none that can be read."""
    try:
        return Plan.load(run.plan)
    except FxpartError:
        return None


def check_same(plan: Plan, before: Plan, where: str) -> None:
    """The plan's updates are those of the run's plan ``before``, whatever their ranks.

    FXP109 where the global batch, the microbatches, the schedule's way with weights, the precision
    or the optimizer differs: each of them changes the numbers. So does another number of stages
    that do not wait for each other, as their forwards miss more updates: that is what an
    asynchronous run of several numbers of ranks asks for.
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
            why=f"the run has {name.replace('_', ' ')} {was!r}, and {now!r} is asked for: its "
            "updates would be others",
            fix=f"leave it as it was ({was!r}), or begin a run in another folder",
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a reader never sees half. OSError."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(data)
    beside.replace(path)


def _asked_digest(path: Path) -> str:
    """What the folder's plans were asked for; "" where that is not known."""
    try:
        return str(from_json(read_bytes(path, _MOST_BYTES)).get("digest", ""))
    except (OSError, ValueError, RecursionError, AttributeError, msgspec.MsgspecError):
        return ""


def _same_model(one: Plan, other: Plan) -> bool:
    return one.model.fingerprint == other.model.fingerprint


def _unwritable(path: Path, why: OSError) -> FxpartError:
    text = why.strerror or str(why)
    return error("FXP603", where=str(path), why=text, fix="give a writable --run folder")
