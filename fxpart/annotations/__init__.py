"""Annotations: what a user says of a model's sharding, and its completed form as a file.

An annotation is a key and placements: ``{"layers.*.up.weight": "tp:S(0)", "input:x": "dp:S(0)"}``.
See docs/annotations.md.
"""

from __future__ import annotations

from fxpart.annotations.completed import dump_annotations, sharding_text
from fxpart.annotations.dtensors import annotations_of_batch, whole_batch, whole_model
from fxpart.annotations.files import load_annotations
from fxpart.annotations.model import annotate, annotations_of, annotations_of_inputs
from fxpart.annotations.origin import why

__all__ = [
    "annotate",
    "annotations_of",
    "annotations_of_batch",
    "annotations_of_inputs",
    "dump_annotations",
    "load_annotations",
    "sharding_text",
    "whole_batch",
    "whole_model",
    "why",
]
