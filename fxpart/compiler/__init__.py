"""Passes and the manager that runs them: levels, verification, observers, reproducers.

A graph is a ``torch.fx.GraphModule`` whose ``meta["fxpart_level"]`` says how far it has come and
whose nodes carry one frozen :class:`NodeAnnotation` under ``node.meta["fxpart"]``.
"""

from __future__ import annotations

from fxpart.compiler.node_annotation import (
    BLOCKS_KEY,
    KEY,
    LEVEL_KEY,
    MESH_KEY,
    NO_CUT_KEY,
    RNG_KEY,
    BlockInfo,
    Level,
    NodeAnnotation,
    NodeSharding,
    SavedTensor,
)
from fxpart.compiler.pass_manager import Pass, PassManager
from fxpart.compiler.pipeline_text import format_pipeline, parse_pipeline

__all__ = [
    "BLOCKS_KEY",
    "KEY",
    "LEVEL_KEY",
    "MESH_KEY",
    "NO_CUT_KEY",
    "RNG_KEY",
    "BlockInfo",
    "Level",
    "NodeAnnotation",
    "NodeSharding",
    "Pass",
    "PassManager",
    "SavedTensor",
    "format_pipeline",
    "parse_pipeline",
]
