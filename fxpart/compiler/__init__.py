"""Compiler passes over FX graphs: pass manager, levels, verifier, observers and reproducers.

A graph is a ``torch.fx.GraphModule``. ``meta["fxpart_level"]`` is its level, and each node carries
one frozen :class:`NodeAnnotation` in ``node.meta["fxpart"]``.
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
