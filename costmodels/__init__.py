"""Cost models, imported as ``fxpart.costmodels``: one model per file, one entry each in the table.

A cost model of another package is registered through the entry point group "fxpart.costmodels" (the
name of the entry is the name of the model, its object the class), one of a script through
:func:`register_cost_model`. Both are used like those of fxpart.
"""

from __future__ import annotations

if __name__ != "fxpart.costmodels":
    raise ImportError(
        f"this package is fxpart.costmodels and was imported as {__name__!r}: "
        "import fxpart.costmodels, and keep fxpart's own repository root off sys.path"
    )

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fxpart.costs import CostModel
from fxpart.errors import error
from fxpart.registry import Registry

from .op_keys import op_key
from .profile_cost_model import ProfileCostModel
from .profile_match import HERE
from .roofline import Roofline

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

Kind = TypeVar("Kind", bound=type[CostModel])

AUTO = "auto"  # the best model that needs no measurement: the first of the table
SUFFIXES = (".profile", ".db")


def check_cost_model(model: object, where: str) -> None:
    """Check that a class or an instance has every member of `CostModel`; raise FXP109 otherwise."""
    members = [name for name in vars(CostModel) if not name.startswith("_")]
    missing = [name for name in members if not hasattr(model, name)]
    if missing:
        raise error(
            "FXP109",
            where=where,
            why=f"The cost model has no {', '.join(missing)}.",
            fix="Derive its class from fxpart.costs.CostModel.",
        )


def _check_entry(name: str, entry: object) -> None:
    """Check a class that is to be registered as a cost model; raise FXP109 otherwise."""
    where = f"cost model {name!r}"
    if name == AUTO or Path(name).suffix in SUFFIXES:
        raise error(
            "FXP109",
            where=where,
            why=f"{AUTO!r} and names that end in {' or '.join(SUFFIXES)} have another meaning.",
            fix="Give the cost model another name.",
        )
    if not isinstance(entry, type):
        raise error(
            "FXP109",
            where=where,
            why="The entry of a cost model is its class, and this is another object.",
            fix="Register the class; from_cluster makes the instance.",
        )
    check_cost_model(entry, where)


COST_MODELS: Registry[type[CostModel]] = Registry(
    "cost model",
    {
        "roofline": Roofline,
    },
    group="fxpart.costmodels",
    check=_check_entry,
)


def register_cost_model(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator that registers a class as the cost model of this name in this process.

    The class derives from `fxpart.costs.CostModel`; ``from_cluster`` makes the instance. Raises
    FXP109 for a name that is taken and for a class without a member of the protocol.
    """

    def register(kind: Kind) -> Kind:
        COST_MODELS.register(name, kind)
        return kind

    return register


def find(name: str | Path, cluster: Cluster | None = None, *, torch: str = "") -> CostModel:
    """Return the cost model of that name, or of the profile at that path, for a cluster.

    "auto" is the best that needs no measurement. A file that exists, or a name that ends in
    ".profile" or ".db", is a profile; other names are those of `COST_MODELS`. torch: the version
    that a profile must have; "" for any. Raises FXP109 for an unknown name, FXP405 and FXP406 for a
    profile that cannot be used.
    """
    path = Path(name)
    if path.suffix in SUFFIXES or path.is_file():
        return ProfileCostModel.load(path, cluster, find(AUTO, cluster), torch)
    if str(name) == AUTO:
        return COST_MODELS[COST_MODELS.builtin[0]].from_cluster(cluster)
    if str(name) not in COST_MODELS:
        raise error(
            "FXP109",
            where=f"cost_model={str(name)!r}",
            why="There is no cost model of this name, and no such profile.",
            fix=f"Use one of {', '.join((AUTO, *COST_MODELS))}, or the file that fxpart profile "
            "wrote.",
        )
    return COST_MODELS[str(name)].from_cluster(cluster)


__all__ = [
    "AUTO",
    "COST_MODELS",
    "HERE",
    "ProfileCostModel",
    "check_cost_model",
    "find",
    "op_key",
    "register_cost_model",
]
