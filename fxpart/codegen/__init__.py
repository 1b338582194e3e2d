"""An assigned graph turned into readable Python modules, one for each stage, and their files."""

from __future__ import annotations

from fxpart.codegen.emit import emit
from fxpart.codegen.evaluation import assign_like
from fxpart.codegen.export import Exported, export, load_exported
from fxpart.codegen.in_blocks import InBlocks
from fxpart.codegen.load import load_stage
from fxpart.codegen.materialise import constants_of, materialise
from fxpart.codegen.split import StageGraph, split

__all__ = [
    "Exported",
    "InBlocks",
    "StageGraph",
    "assign_like",
    "constants_of",
    "emit",
    "export",
    "load_exported",
    "load_stage",
    "materialise",
    "split",
]
