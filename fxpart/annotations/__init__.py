"""Sharding annotations: requested placements of a model, and the completed result as a file.

An annotation is a key and placements: ``{"layers.*.up.weight": "tp:S(0)", "input:x": "dp:S(0)"}``.
See docs/parallelism.md.
"""

from __future__ import annotations

from fxpart.annotations.annotation_dump import dump_annotations, sharding_text
from fxpart.annotations.dtensor_annotations import (
    annotations_of_batch,
    gather_batch_dtensors,
    gather_model_dtensors,
)
from fxpart.annotations.files import load_annotations
from fxpart.annotations.model import annotate, annotations_of, annotations_of_inputs
from fxpart.annotations.placement_origin import why

__all__ = [
    "annotate",
    "annotations_of",
    "annotations_of_batch",
    "annotations_of_inputs",
    "dump_annotations",
    "gather_batch_dtensors",
    "gather_model_dtensors",
    "load_annotations",
    "sharding_text",
    "why",
]
