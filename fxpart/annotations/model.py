"""Annotations on a module, including those of its DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import tensor as distributed

from fxpart.annotations.entry_syntax import (
    FIX,
    STATE,
    AnnotationKey,
    merge_annotations,
    read_placements,
    text_problems,
)
from fxpart.annotations.files import load_annotations
from fxpart.compat import unwrap_compiled, unwrapped
from fxpart.errors import FxpartError, Problem, error
from fxpart.sharding import PARTIAL, REPLICATE, Placement, Shard

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_fxpart_annotations"


def annotate(model: Model, annotations: Mapping[str, str] | str | Path) -> Model:
    """Annotate how parts of ``model`` are sharded for ``fxpart.compile``; return the model.

    annotations: key -> placements, ``{"layers.*.up.weight": "tp:S(0)", "input:x": "dp:S(0)"}``, or
    the path of a TOML or JSON file. Keys are name patterns of parameters and buffers (fnmatch),
    ``input:NAME``, ``node:NAME`` (of the captured graph), ``module:PATH`` (the module's result) and
    ``op:NAME`` (the sharded factor). Axes without an entry are undecided. A second call adds
    annotations. Raise FXP111 with all problems, FXP112 with all contradictions.
    """
    if not isinstance(model, nn.Module):
        why = f"it is a {type(model).__name__}, not a module"
        raise error("FXP111", where="annotate(model, ...)", why=why, fix="pass a torch.nn.Module")
    given = load_annotations(annotations) if isinstance(annotations, (str, Path)) else annotations
    plain = unwrapped(model)
    with unwrap_compiled(plain):
        problems = text_problems(given)
        if not problems:
            problems = [p for key, text in given.items() for p in _misfits(plain, key, text)]
        if problems:
            raise FxpartError(problems)
        own = merge_annotations(getattr(plain, ATTRIBUTE, {}), given)
        problems = contradictions(own, _state_names(plain))
    if problems:
        raise FxpartError(problems)
    setattr(plain, ATTRIBUTE, own)
    return model


def annotations_of(model: nn.Module) -> dict[str, str]:
    """Return the annotations of a model and its DTensor parameters; raise FXP111, FXP112."""
    plain = unwrapped(model)
    own: dict[str, str] = getattr(plain, ATTRIBUTE, {})
    with unwrap_compiled(plain):
        state: dict[str, torch.Tensor] = {
            **dict(plain.named_parameters(remove_duplicate=False)),
            **dict(plain.named_buffers(remove_duplicate=False)),
        }
    held = {
        name: _of_dtensor(tensor, name)
        for name, tensor in state.items()
        if isinstance(tensor, distributed.DTensor)
    }
    together = merge_annotations(own, held)
    problems = contradictions(together, list(state))
    if problems:
        raise FxpartError(problems)
    return together


def annotations_of_inputs(names: Sequence[str], tensors: Sequence[object]) -> dict[str, str]:
    """Return ``input:NAME`` entries of the inputs that are DTensors."""
    return {
        f"input:{name}": _of_dtensor(tensor, f"input:{name}")
        for name, tensor in zip(names, tensors, strict=True)
        if isinstance(tensor, distributed.DTensor)
    }


def contradictions(entries: Mapping[str, str], names: Sequence[str]) -> list[Problem]:
    """Return problems for state that two keys place differently on one axis."""
    said: dict[tuple[str, str], tuple[Placement, str]] = {}
    problems: list[Problem] = []
    known = dict.fromkeys(names)
    for text in entries:
        key = AnnotationKey.parse(text)
        if key.kind != STATE:
            continue
        for axis, placement in read_placements(entries[text]).items():
            for name in key.select(known):
                before, by = said.setdefault((name, axis), (placement, text))
                if before != placement:
                    why = (
                        f"{by!r} requests {axis}:{before}, but {text!r} requests {axis}:{placement}"
                    )
                    problems.append(Problem("FXP112", name, why, "remove one of the two"))
    return problems


def _state_names(model: nn.Module) -> list[str]:
    """Return every name of every parameter and buffer."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [n for n, _ in (*parameters, *model.named_buffers(remove_duplicate=False))]


def _misfits(model: nn.Module, text: str, placements: str) -> list[Problem]:
    """Return problems for a key that matches nothing in the module, or dims that tensors lack.

    Inputs and nodes are only known after capture, axis sizes only with the mesh.
    """
    key = AnnotationKey.parse(text)
    where = f"annotation {text!r}"
    if key.kind == "module":
        if key.select(dict.fromkeys(n for n, _ in model.named_modules(remove_duplicate=False))):
            return []
        return [Problem("FXP111", where, "the model has no such module", FIX)]
    if key.kind != STATE:
        return []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {
        **parameters,
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names = key.select(tensors)
    if not names:
        return [Problem("FXP111", where, "the model has no such parameter or buffer", FIX)]
    found = []
    for axis, placement in read_placements(placements).items():
        for name in names:
            why = explain_invalid_placement(placement, tuple(tensors[name].shape), 1, state=True)
            if why:
                found.append(Problem("FXP111", f"{where}, {name}, {axis}:{placement}", why, FIX))
    return found


def explain_invalid_placement(
    placement: Placement, shape: Sequence[int | torch.SymInt], parts: int, *, state: bool
) -> str:
    """Return why a tensor of this shape cannot have a placement on an axis; "" if it can.

    Symbolic sizes are assumed to divide; the runtime checks the batch.
    """
    if placement == PARTIAL:
        return "parameters, buffers and inputs are not sums" if state else ""
    if not isinstance(placement, Shard):
        return ""
    if placement.dim >= len(shape):
        return f"it has {len(shape)} dims, so there is no dim {placement.dim}"
    size = shape[placement.dim]
    if isinstance(placement.outer, str):
        return "a number of parts is a positive integer"
    if not isinstance(size, int):
        return ""
    if size % placement.outer:
        return f"dim {placement.dim} of size {size} is not {placement.outer} equal parts"
    if size // placement.outer < parts:
        part = f"each of {placement.outer} parts of dim" if placement.outer > 1 else "dim"
        return (
            f"{part} {placement.dim} has size {size // placement.outer}, and the axis has "
            f"{parts} ranks"
        )
    if placement.outer > 1 and (size // placement.outer) % parts:
        return f"each of {placement.outer} parts must be a multiple of {parts}"
    return ""


def _of_dtensor(tensor: distributed.DTensor, name: str) -> str:
    """Return the placements of a DTensor as text; raise FXP111 for unsupported ones."""
    names = tensor.device_mesh.mesh_dim_names
    where, fix = f"the DTensor {name}", "use Shard(dim) and Replicate() on a mesh with named dims"
    if names is None:
        raise error("FXP111", where=where, why="its device mesh has no mesh_dim_names", fix=fix)
    words = []
    for axis, placement in zip(names, tensor.placements, strict=True):
        own: Placement
        if type(placement) is distributed.Shard:
            own = Shard(placement.dim % tensor.ndim)
        elif type(placement) is distributed.Replicate:
            own = REPLICATE
        else:
            raise error("FXP111", where=where, why=f"{placement} along {axis}", fix=fix)
        words.append(f"{axis}:{own}")
    return ",".join(words)
