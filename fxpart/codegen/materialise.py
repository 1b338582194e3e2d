"""A stage's weights: from live tensors, from safetensors files, or from an init function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpart.codegen.tensor_files import TensorFiles
from fxpart.compat import is_fake
from fxpart.errors import FxpartError, Problem
from fxpart.program import ProgramSpec, StageSpec, StateSpec

Init = Callable[[str, torch.Tensor], torch.Tensor]
Source = Mapping[str, torch.Tensor] | str | Path | Init
_SHOWN = 20


class Part(Protocol):
    """A rank's part of whole tensors, by name."""

    def __call__(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part."""

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """The part as one range of each dim of the whole shape, None if it is not."""


class _Tensors(Protocol):
    """Tensors by name, read one by one."""

    def names(self) -> Collection[str]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor: ...


class _Live:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        return self.tensors[name][slices]


def materialise(
    module: torch.nn.Module,
    spec: ProgramSpec,
    source: Source,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    strict: bool = True,
    part: Part | None = None,
) -> None:
    """Fill the state of a stage module, on the module's device; every tensor is a copy.

    source: tensors by original name; or a safetensors file or folder, of which only this rank's
    part of this stage's tensors is read; or a function ``(name, meta tensor) -> tensor``, which
    must return the same numbers for one name whenever it is called, as ties are filled on several
    stages. constants: tensors that no checkpoint holds (lifted constants, buffers that are not
    persistent). strict: names that the model does not know are a fault. part: what takes this
    rank's part out of a whole tensor, where a stage is several ranks. Floating tensors are
    converted to the stage's dtype. Raises FXP110 with all faults at once, and then changes nothing.
    """
    index = module.INDEX
    assert isinstance(index, int)
    stage = spec.stages[index]
    constants = constants or {}
    shapes = {state.name: _whole(spec, state) for state in stage.state}
    if callable(source) and not isinstance(source, Mapping):
        found, problems = _called(stage, source, constants, shapes)
        cut: set[str] = set()
    else:
        tensors: _Tensors = _Live(source) if isinstance(source, Mapping) else TensorFiles(source)
        found, problems, cut = _read(stage, spec, tensors, constants, _Wanted(shapes, part))
        if strict:
            problems.extend(_unknown(stage, spec, tensors.names()))
    for state in stage.state:
        if state.name in found:
            shape = state.shape if state.name in cut else shapes[state.name]
            problems.extend(_faults(stage, state, found[state.name], shape))
    if problems:
        raise FxpartError(problems)
    for state in stage.state:
        tensor = found[state.name]
        if part is not None and state.name not in cut:
            tensor = part(state.name, tensor)
        _fill(module, state, tensor)


def _whole(spec: ProgramSpec, state: StateSpec) -> tuple[int, ...]:
    """The shape of the whole tensor, which is what checkpoints hold."""
    held = None if spec.sharding is None else spec.sharding.state.get(state.name)
    return state.shape if held is None else held.shape


def constants_of(spec: ProgramSpec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that no checkpoint holds, of those that have data: by main name, sorted."""
    names = {s.name for stage in spec.stages for s in stage.state if not s.persistent}
    return {n: state[n] for n in sorted(names) if n in state and not is_fake(state[n])}


def _called(
    stage: StageSpec,
    init: Init,
    constants: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, torch.Tensor], list[Problem]]:
    found: dict[str, torch.Tensor] = {}
    problems: list[Problem] = []
    for state in stage.state:
        if state.name in constants:
            found[state.name] = constants[state.name]
            continue
        meta = torch.empty(shapes[state.name], dtype=getattr(torch, state.dtype), device="meta")
        value: Any = init(state.name, meta)
        if isinstance(value, torch.Tensor):
            found[state.name] = value
        else:
            why = f"the init function returned {type(value).__name__}"
            problems.append(_problem(stage, state.name, why, "return a tensor for every name"))
    return found, problems


@dataclass(frozen=True)
class _Wanted:
    """The shapes of whole tensors by name, and what takes this rank's part of them."""

    shapes: Mapping[str, tuple[int, ...]]
    part: Part | None

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """What to read of a stored tensor; None for all of it (also where its shape is wrong)."""
        if self.part is None or shape != self.shapes[name]:
            return None
        return self.part.slices(name, shape)


def _read(
    stage: StageSpec,
    spec: ProgramSpec,
    tensors: _Tensors,
    constants: Mapping[str, torch.Tensor],
    wanted: _Wanted,
) -> tuple[dict[str, torch.Tensor], list[Problem], set[str]]:
    """The stage's tensors by main name, and of which only a part was read.

    A tie may be stored under any of its names.
    """
    others: dict[str, list[str]] = {}
    for alias, main in spec.aliases.items():
        others.setdefault(main, []).append(alias)
    names = tensors.names()
    found: dict[str, torch.Tensor] = {}
    missing: list[str] = []
    cut: set[str] = set()
    for state in stage.state:
        stored = next((n for n in (state.name, *others.get(state.name, ())) if n in names), None)
        if stored is not None:
            slices = wanted.slices(state.name, tensors.shape(stored))
            if slices is None:
                found[state.name] = tensors.read(stored)
            else:
                found[state.name] = tensors.read_part(stored, slices)
                cut.add(state.name)
        elif state.name in constants:
            found[state.name] = constants[state.name]
        else:
            missing.append(state.name)
    if not missing:
        return found, [], cut
    fix = "give a checkpoint of this model, with the names of model.state_dict()"
    return found, [_problem(stage, f"{len(missing)} missing", _list(missing), fix)], cut


def _unknown(stage: StageSpec, spec: ProgramSpec, names: Iterable[str]) -> list[Problem]:
    known = {s.name for part in spec.stages for s in part.state}
    known |= {*spec.unused, *spec.aliases}
    extra = [name for name in names if name not in known]
    if not extra:
        return []
    fix = "give a checkpoint of this model, or strict=False to leave them out"
    return [_problem(stage, f"{len(extra)} that the model does not have", _list(extra), fix)]


def _faults(
    stage: StageSpec, state: StateSpec, tensor: torch.Tensor, shape: tuple[int, ...]
) -> list[Problem]:
    if is_fake(tensor):
        return [_problem(stage, state.name, "it has no data (a meta tensor)", "load real weights")]
    whys = []
    if tuple(tensor.shape) != shape:
        whys.append(f"its shape is {list(tensor.shape)}, the model's is {list(shape)}")
    wanted: torch.dtype = getattr(torch, state.dtype)
    if tensor.dtype != wanted and not (tensor.is_floating_point() and wanted.is_floating_point):
        whys.append(f"its dtype is {tensor.dtype}, the model's is {wanted}")
    return [_problem(stage, state.name, why, "load weights of this model") for why in whys]


def _problem(stage: StageSpec, what: str, why: str, fix: str) -> Problem:
    return Problem("FXP110", f"stage {stage.index}: {what}", why, fix)


def _list(names: list[str]) -> str:
    shown = "\n".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}\nand {len(names) - _SHOWN} more"


def _fill(module: torch.nn.Module, state: StateSpec, tensor: torch.Tensor) -> None:
    """Put a copy of the tensor in place of the empty one."""
    dtype: torch.dtype = getattr(torch, state.dtype)
    device: Any = module.device
    value = tensor.detach().to(device=device, dtype=dtype, copy=True)
    if state.kind == "parameter":
        value = torch.nn.Parameter(value, requires_grad=state.requires_grad)
    setattr(module, state.attribute, value)
