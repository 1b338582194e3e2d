"""What crosses stage boundaries, read off a program: one list that every rank computes alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpart.errors import error
from fxpart.program import Dim, ProgramSpec, StageSpec, ValueSpec
from fxpart.schedule.action import StageEdge


@dataclass(frozen=True)
class Link:
    """One value from one stage to another.

    output: its position among the source's outputs; input: among the target's inputs. gradient:
    whether its gradient comes back.
    """

    name: str
    source: int
    target: int
    output: int
    input: int
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    gradient: bool


def links(spec: ProgramSpec) -> tuple[Link, ...]:
    """All links, ordered by source, target and output; FXP900 where two stages disagree."""
    found: list[Link] = []
    for stage in spec.stages:
        for position, (value, source) in enumerate(zip(stage.inputs, stage.sources, strict=True)):
            if source >= 0:
                found.append(_link(spec, stage, position, value, source))
    return tuple(sorted(found, key=lambda link: (link.source, link.target, link.output)))


def edges(spec: ProgramSpec) -> tuple[StageEdge, ...]:
    """The stage graph: one edge for each pair of stages with a link between them."""
    backward: dict[tuple[int, int], bool] = {}
    for link in links(spec):
        pair = (link.source, link.target)
        backward[pair] = backward.get(pair, False) or link.gradient
    return tuple(StageEdge(*pair, backward=back) for pair, back in sorted(backward.items()))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name ("float32")."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise error("FXP303", where=f"dtype {name[:40]!r}", why="torch has no such dtype", fix="")
    return found


def _link(
    spec: ProgramSpec, stage: StageSpec, position: int, value: ValueSpec, source: int
) -> Link:
    names = [output.name for output in spec.stages[source].outputs]
    if source >= stage.index or value.name not in names:
        raise error(
            "FXP900",
            where=f"stage {stage.index}, input {value.name}",
            why=f"stage {source} does not produce it before",
            fix="",
        )
    output = names.index(value.name)
    made = spec.stages[source].outputs[output]
    if (made.dtype, made.shape) != (value.dtype, value.shape):
        raise error(
            "FXP900",
            where=f"value {value.name} from stage {source} to stage {stage.index}",
            why=f"it is {made.dtype} {made.shape} there and {value.dtype} {value.shape} here",
            fix="",
        )
    return Link(
        value.name, source, stage.index, output, position,
        torch_dtype(value.dtype), value.shape, value.requires_grad and made.requires_grad,
    )  # fmt: skip
