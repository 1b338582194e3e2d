"""An assigned graph turned into readable Python modules, one for each stage, and their files."""

from __future__ import annotations

from fxpart.codegen.emit import emit
from fxpart.codegen.load import load_stage
from fxpart.codegen.split import StageGraph, split

__all__ = ["StageGraph", "emit", "load_stage", "split"]
