"""Cost models, imported as ``fxpart.costmodels``: one model a file, one line each in the table."""

from __future__ import annotations

from fxpart.costs import CostModel

if __name__ != "fxpart.costmodels":
    raise ImportError("import fxpart.costmodels, not costmodels")

COST_MODELS: dict[str, type[CostModel]] = {}
