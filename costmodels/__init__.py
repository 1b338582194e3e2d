"""Cost models, imported as ``fxpart.costmodels``: one model a file, one line each in the table.

A cost model of another package joins through the entry point group "fxpart.costmodels": the
entry's name is the model's name, its object the class.
"""

from __future__ import annotations

if __name__ != "fxpart.costmodels":
    raise ImportError(
        f"this package is fxpart.costmodels and was imported as {__name__!r}: "
        "import fxpart.costmodels, and keep fxpart's own repository root off sys.path"
    )

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from fxpart.errors import error

from .op_keys import op_key
from .profile_cost_model import ProfileCostModel
from .profile_match import HERE
from .roofline import Roofline

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel

COST_MODELS: dict[str, type[CostModel]] = {
    "roofline": Roofline,
}

AUTO = "roofline"
SUFFIXES = (".profile", ".db")


def find(name: str | Path, cluster: Cluster | None = None, *, torch: str = "") -> CostModel:
    """The cost model of that name, or the profile at that path, for a cluster.

    "auto" is the best that needs no measurement. A file that exists, or a name that ends in
    ".profile" or ".db", is a profile. Others are looked up in the table, then among the entry
    points "fxpart.costmodels". torch: the version that a profile has to be of; "" for any. Raises
    FXP109 where there is none of that name, FXP405 and FXP406 for a profile that cannot be used.
    """
    path = Path(name)
    if path.suffix in SUFFIXES or path.is_file():
        return ProfileCostModel.load(path, cluster, _made(COST_MODELS[AUTO], cluster), torch)
    wanted = AUTO if name == "auto" else str(name)
    if wanted in COST_MODELS:
        return _made(COST_MODELS[wanted], cluster)
    found = {entry.name: entry for entry in entry_points(group="fxpart.costmodels")}
    if wanted in found:
        model: CostModel = found[wanted].load()()
        return model
    raise error(
        "FXP109",
        where=f"cost_model={str(name)!r}",
        why="there is no cost model of this name, and no such profile",
        fix=f"one of auto, {', '.join(sorted({*COST_MODELS, *found}))}, or the file that "
        "fxpart profile wrote",
    )


def _made(kind: type[CostModel], cluster: Cluster | None) -> CostModel:
    """A model of the table, with what was measured of the cluster's collectives."""
    curves = UNSET if cluster is None else cluster.collectives
    return Roofline(curves) if kind is Roofline and curves is not UNSET else kind()


__all__ = ["AUTO", "COST_MODELS", "HERE", "ProfileCostModel", "find", "op_key"]
