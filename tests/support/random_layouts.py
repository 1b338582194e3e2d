"""Random layouts: a model, how it is divided over ranks, and how it is trained on them.

A case is drawn from its number alone, so that a failed one can be repeated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from layout_models import MODELS

from fxpart.schedule.spec import SCHEDULES

MOST_RANKS = 8
# What a run does besides: applies the plan's text again, exports the program, averages weights,
# changes learning rates, freezes parameters later, reads gradients, gathers parameters ahead.
EXTRAS = ("reapply", "export", "ema", "rates", "freeze", "gradients", "ahead")
OPTIMIZERS = ("adamw", "adamw", "sgd", "adagrad", "rmsprop", "amsgrad", "nadam", "adadelta")
SEARCHED = tuple(name for name, spec in SCHEDULES.items() if spec.trains and spec.flushes)


@dataclass(frozen=True)
class Layout:
    """A layout: the devices and constraints to plan with. kind: for statistics."""

    kind: str
    devices: int
    microbatches: int
    constraints: dict[str, Any]
    recompute: dict[int, str] | None = None


@dataclass(frozen=True)
class LayoutCase:
    """One training run.

    rows: of the batches of each update; the gradients of several are added. length: of sequences at
    capture; lengths: by update, where they differ. extras: of EXTRAS.
    """

    number: int
    model: str
    layers: int
    dtype: str
    dropout: bool
    frozen: tuple[str, ...]
    length: int
    compiled_rows: int
    rows: tuple[tuple[int, ...], ...]
    layout: Layout
    moved: Layout | None
    optimizer: str
    decays: bool
    clip: dict[str, float] = field(default_factory=dict)
    evaluates: bool = False
    lengths: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()
    uneven: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.dtype, *(["dropout"] if self.dropout else []), str(self.layout)]
        return f"case {self.number}: {' '.join(parts)}"


def draw_case(number: int, dtype: str = "float64", ranks: int = MOST_RANKS) -> LayoutCase:
    """Draw a case by its number. ranks: at most so many."""
    random = Random(number)
    model = random.choice(tuple(MODELS))
    spec = MODELS[model]
    layers = random.choice((2, 3, 4))
    dropout = spec.drops and random.random() < 0.3
    if spec.experts and random.random() < 0.6 and dtype == "float64":
        dtype = "float32"  # grouped products of experts have no kernel in float64
    length = random.choice((8, 9, 12, 16))
    exactly = ranks < MOST_RANKS
    experts = dtype != "float64"
    layout = draw_layout(random, model, ranks, exactly, experts)
    moved = draw_layout(random, model, ranks, exactly, experts) if random.random() < 0.35 else None
    multiple = 24 if dropout or dtype == "bf16" else 1
    sizes = (24, 48) if multiple > 1 else (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13)
    accumulated = random.random() < 0.25
    rows = tuple(
        tuple(random.choice(sizes) for _ in range(random.choice((1, 2)) if accumulated else 1))
        for _ in range(3)
    )
    clip: dict[str, float] = {}
    if random.random() < 0.4:
        clip = random.choice(({"clip_norm": 0.05}, {"clip_norm": 0.5}, {"clip_value": 1e-3}))
    return LayoutCase(
        number=number, model=model, layers=layers, dtype=dtype, dropout=dropout,
        frozen=_draw_frozen(random, model), length=length,
        compiled_rows=multiple if multiple > 1 else random.choice((8, 12, 24, 24)),
        rows=rows, layout=layout, moved=moved,
        optimizer="sgd" if spec.sparse else random.choice(OPTIMIZERS),
        decays=not spec.sparse and random.random() < 0.5, clip={} if spec.sparse else clip,
        evaluates=random.random() < 0.4,
        lengths=random.choices((8, 12, 16, 24), k=3) if random.random() < 0.2 else (),
        extras=tuple(extra for extra in EXTRAS if random.random() < 0.12),
        uneven=random.random() < 0.3,
    )  # fmt: skip


def _draw_frozen(random: Random, model: str) -> tuple[str, ...]:
    if random.random() > 0.2:
        return ()
    frozen = {
        "gpt2": ("transformer.wte", "transformer.h.0"), "llama": ("model.embed_tokens",),
        "mixtral": ("model.layers.0.self_attn",), "deepseek": ("model.layers.1.mlp.gate",),
        "bert": ("bert.embeddings", "bert.encoder.layer.0"), "vit": ("vit.embeddings",),
        "t5": ("encoder.block.0",), "unet": ("down.0",), "recommender": ("left", "user"),
    }  # fmt: skip
    return frozen.get(model, ())


def draw_layout(
    random: Random, model: str, ranks: int, exactly: bool = False, experts: bool = True
) -> Layout:
    """Draw a layout of the model over at most so many ranks, or exactly so many.

    experts: whether its products of experts can be distributed.
    """
    spec = MODELS[model]
    kinds = ["pipeline", "pipeline", "mesh", "mesh", "mesh", "degrees", "replicas", "free"]
    if spec.has_attention:
        kinds += ["context", "context"]
    if spec.experts:
        kinds += ["experts", "experts"]
    for _ in range(1000):
        made = _KINDS[random.choice(kinds)](random, model, ranks)
        if "ep" in made.constraints and not experts:
            continue
        if made.devices <= ranks and (not exactly or made.devices == ranks):
            if exactly and made.kind in ("degrees", "free"):
                made.constraints["ranks"] = ranks
            return made
    raise AssertionError("no layout was found")


def _draw_schedule(random: Random, given: dict[str, Any]) -> None:
    """Add a schedule, and stages per rank where it has several."""
    name = random.choice(("", *SEARCHED))
    if not name:
        return
    given["schedule"] = name
    least, most = SCHEDULES[name].stages_per_rank
    if SCHEDULES[name].is_virtual and least != most and random.random() < 0.6:
        given["virtual"] = random.choice((2, 3))


def _draw_recompute(random: Random, given: dict[str, Any], stages: int) -> dict[int, str] | None:
    """Add a mode of recomputation, or return one for each stage."""
    drawn = random.random()
    modes = ("none", "selective", "full")
    if drawn < 0.25:
        given["recompute"] = random.choice(modes)
    elif drawn < 0.4:
        return {stage: random.choice(modes) for stage in range(stages)}
    return None


def _pipeline(random: Random, model: str, ranks: int) -> Layout:
    stages = random.choice((1, 2, 2, 3, 4))
    given: dict[str, Any] = {"mesh": "none", "stages": stages}
    _draw_schedule(random, given)
    recompute = _draw_recompute(random, given, stages)
    return Layout("pipeline", stages, random.choice((1, 2, 3, 4, 6, 8)), given, recompute)


def _mesh(random: Random, model: str, ranks: int) -> Layout:
    axes = {}
    if random.random() < 0.7:
        axes["dp"] = random.choice((2, 2, 3, 4))
    if random.random() < 0.6 or not axes:
        axes["tp"] = random.choice((2, 2, 2, 4))
    return _on_mesh(random, model, axes, "mesh")


def _on_mesh(random: Random, model: str, axes: dict[str, int], kind: str) -> Layout:
    spec = MODELS[model]
    stages = random.choice((1, 1, 2, 2, 3))
    given: dict[str, Any] = {
        "mesh": ",".join(f"{axis}={size}" for axis, size in axes.items()), "stages": stages,
    }  # fmt: skip
    if "dp" in axes and random.random() < 0.7:
        given["zero"] = random.choice((0, 1, 2, 3))
    if random.random() < 0.1:
        given |= {"zero": random.choice((1, 2, 3)), "zero_axis": random.choice(list(axes))}
    elif axes.get("dp") == 4 and given.get("zero") and stages != 2:
        given["shard_degree"] = 2
    elif {"dp", "cp"} <= {*axes} and given.get("zero") in (1, 2) and stages != 2:
        given["zero_axis"] = "dp,cp"
    if stages > 1 or random.random() < 0.2:
        _draw_schedule(random, given)
    annotations: dict[str, str] = {}
    if "tp" in axes and random.random() < 0.6:
        annotations |= spec.tensor
        if spec.sequence and random.random() < 0.5:
            annotations |= spec.sequence
            kind = "sequence"
    if "ep" in axes:
        annotations = {key: text for key, text in annotations.items() if "experts" not in key}
        annotations |= {key: text.replace("AXIS", "ep") for key, text in spec.experts.items()}
    if kind == "tables":
        annotations |= {"input:*": "dp:S(0)", "*user.weight": "dp:S(0)", "item.weight": "dp:S(0)"}
    if annotations:
        given["annotations"] = json.dumps({"annotations": annotations})
        if random.random() < 0.2:
            given["placements"] = "annotated"
    recompute = _draw_recompute(random, given, stages)
    size = stages
    for each in axes.values():
        size *= each
    return Layout(kind, size, random.choice((1, 2, 2, 3, 4)), given, recompute)


def _context(random: Random, model: str, ranks: int) -> Layout:
    axes = {"cp": random.choice((2, 2, 3, 4))}
    if random.random() < 0.4:
        axes = {"dp": 2, **axes}
    if random.random() < 0.2:
        axes = {"tp": 2, **axes}
    return _on_mesh(random, model, axes, "context")


def _experts(random: Random, model: str, ranks: int) -> Layout:
    drawn = random.random()
    if drawn < 0.4:
        axes = {"ep": random.choice((2, 4))}
        if random.random() < 0.5:
            axes = {"dp": 2, **axes}
        if random.random() < 0.3:
            axes["tp"] = 2
        return _on_mesh(random, model, axes, "experts")
    made = _on_mesh(random, model, {"dp": random.choice((2, 2, 4))}, "experts")
    made.constraints["ep"] = made.constraints["mesh"].partition("=")[2]
    return made


def _degrees(random: Random, model: str, ranks: int) -> Layout:
    given: dict[str, Any] = {}
    devices = random.choice((2, 3, 4, 4, 6, 8))
    for key, values in {"dp": (1, 2), "tp": (1, 2), "stages": (1, 2), "zero": (0, 1, 2, 3)}.items():
        if random.random() < 0.4:
            given[key] = random.choice(values)
    if random.random() < 0.3:
        given["ranks"] = random.choice([n for n in (2, 3, 4, 6, 8) if n <= devices])
    if random.random() < 0.4:
        _draw_schedule(random, given)
    recompute = _draw_recompute(random, given, 1)
    return Layout("degrees", devices, random.choice((1, 2, 4)), given, recompute)


def _replicas(random: Random, model: str, ranks: int) -> Layout:
    stages = random.choice((1, 2, 2, 3))
    devices = stages + random.choice((1, 2))
    given: dict[str, Any] = {"copies": "always", "stages": stages}
    if random.random() < 0.4:
        given["schedule"] = random.choice(("gpipe", "1f1b"))
    recompute = _draw_recompute(random, given, stages)
    if random.random() < 0.5:
        devices *= 2
        given |= {"mesh": random.choice(("dp=2", "tp=2")), "ranks": devices}
        if given["mesh"] == "dp=2":
            given["zero"] = random.choice((0, 1, 2, 3))
    return Layout("replicas", devices, random.choice((2, 3, 4, 6)), given, recompute)


def _free(random: Random, model: str, ranks: int) -> Layout:
    forbidden = ["recompute", "zero=0", "dp=1", "tp", "dp", "pp=1", "microbatches=1", "cp", "ep"]
    given: dict[str, Any] = {}
    if random.random() < 0.7:
        given["forbid"] = "; ".join(random.sample(forbidden, random.choice((1, 2))))
    if random.random() < 0.2:
        given["time_limit"] = 2
    return Layout("free", random.choice((2, 3, 4, 8)), random.choice((1, 2, 4)), given)


_KINDS = {
    "pipeline": _pipeline, "mesh": _mesh, "context": _context, "experts": _experts,
    "degrees": _degrees, "replicas": _replicas, "free": _free,
}  # fmt: skip
