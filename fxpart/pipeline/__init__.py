"""Passes and the manager that runs them: levels, verification, observers, reproducers.

A graph is a ``torch.fx.GraphModule`` whose ``meta["fxpart_level"]`` says how far it has come and
whose nodes carry one frozen :class:`Annotation` under ``node.meta["fxpart"]``.
"""

from __future__ import annotations

from fxpart.pipeline.annotation import (
    BLOCKS_KEY,
    KEY,
    LEVEL_KEY,
    MESH_KEY,
    NO_CUT_KEY,
    RNG_KEY,
    Annotation,
    BlockInfo,
    Level,
    NodeSharding,
    Saved,
)
from fxpart.pipeline.manager import Pass, PassManager
from fxpart.pipeline.text import format_pipeline, parse_pipeline

__all__ = [
    "BLOCKS_KEY",
    "KEY",
    "LEVEL_KEY",
    "MESH_KEY",
    "NO_CUT_KEY",
    "RNG_KEY",
    "Annotation",
    "BlockInfo",
    "Level",
    "NodeSharding",
    "Pass",
    "PassManager",
    "Saved",
    "format_pipeline",
    "parse_pipeline",
]
