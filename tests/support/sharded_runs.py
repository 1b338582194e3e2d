"""Models of the zoo compiled for one rank, cut in every way; and what a comparison found wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from sharded_models import TENSOR, WAYS
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.capture.flat_batch import flatten_batch, unflatten_batch
from fxpart.verification.verification_result import TOLERANCE, Verification

STEPS = 3
# BatchNorm over a few pixels: the last bit of a weight changes the third step's gradients wholly,
# in one process too. There float32 can show nothing, so all of it runs in float64.
CHAOTIC = {"resnet50"}
# In float64 nothing but what is zero in exact arithmetic (the bias of attention keys) is noise.
KEY_BIASES = {"bert": 4, "vit": 4}


@dataclass(frozen=True)
class Base:
    """A model compiled for one rank, and its batch."""

    program: Program
    batch: Any
    microbatches: int

    def sharded(self, model: str, way: str) -> Program:
        """The same model cut in one of the ways."""
        constraints = dict(WAYS[way])
        if "tp" in str(constraints["mesh"]):
            constraints["annotations"] = json.dumps({"annotations": TENSOR[model]})
        return self.program.replan(
            "local:4", microbatches=self.microbatches, constraints=constraints
        )


@cache
def base(model: str, dtype: torch.dtype | None = None) -> Base:
    """The model, captured once for all ways. dtype: float32 but for the chaotic ones."""
    dtype = dtype or (torch.float64 if model in CHAOTIC else torch.float32)
    if not ZOO[model].available:
        pytest.skip(f"{model} needs {ZOO[model].needs}")
    built = ZOO[model].build()
    parts = flatten_batch(built.batch)
    batch = unflatten_batch(
        parts.tree, [t.to(dtype) if t.is_floating_point() else t for t in parts.tensors]
    )
    microbatches = 2 if ZOO[model].cuttable else 1
    program = fxpart.compile(
        built.model.to(dtype), "local:1", example_inputs=batch, loss=built.loss,
        batch_size=built.batch_size, batch_dims=built.batch_dims, microbatches=microbatches,
    )  # fmt: skip
    return Base(program, batch, microbatches)


def told(found: Verification) -> str:
    """What differs, for the message of a failed test."""
    worst = sorted(
        (d for d in found.differences if not d.noise), key=lambda d: -max(d.gradient, d.parameter)
    )
    rows = [f"{d.name}: gradient {d.gradient:.1e}, value {d.parameter:.1e}" for d in worst[:4]]
    return f"largest {found.largest:.1e}, losses {found.losses}\n" + "\n".join(rows)


def wrong(model: str, found: Verification) -> str:
    """Why a run in float32 is not that of one process; "" where it is."""
    return "" if found.passed and found.steps == STEPS else told(found)


def wrong_at_first(model: str, found: Verification) -> str:
    """The first step's gradients: within 1e-6 strictly, whatever rounding may do later."""
    above = {d.name: d.gradient for d in found.differences if d.gradient > TOLERANCE}
    return "" if len(above) <= KEY_BIASES.get(model, 0) else f"first step: {above}"
