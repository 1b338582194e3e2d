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
from typing import TYPE_CHECKING

from fxpart.errors import error

from .roofline import Roofline

if TYPE_CHECKING:
    from fxpart.costs import CostModel

COST_MODELS: dict[str, type[CostModel]] = {
    "roofline": Roofline,
}

AUTO = "roofline"


def find(name: str) -> CostModel:
    """The cost model of that name; "auto" is the best that needs no measurement.

    Looks in the table, then among the entry points "fxpart.costmodels". Raises FXP109 where there
    is none of that name.
    """
    wanted = AUTO if name == "auto" else name
    if wanted in COST_MODELS:
        return COST_MODELS[wanted]()
    found = {entry.name: entry for entry in entry_points(group="fxpart.costmodels")}
    if wanted in found:
        model: CostModel = found[wanted].load()()
        return model
    raise error(
        "FXP109",
        where=f"cost_model={name!r}",
        why="there is no cost model of this name",
        fix=f"one of auto, {', '.join(sorted({*COST_MODELS, *found}))}",
    )


__all__ = ["AUTO", "COST_MODELS", "find"]
