"""Load a stage's weights from live tensors, safetensors files or an init function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpart.codegen.blockwise_init import InBlocks
from fxpart.codegen.tensor_files import TensorFiles
from fxpart.compat import is_fake
from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import ProgramSpec, StageSpec, StateSpec
from fxpart.rng import mix

_DEPTH = 2  # maximum components of a prefix

Init = InBlocks | Callable[[str, torch.Tensor], torch.Tensor]
Source = Mapping[str, torch.Tensor] | str | Path | Init
_SHOWN = 20


class ShardSelector(Protocol):
    """Selects a rank's shard of whole tensors, by name."""

    def __call__(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's shard."""

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return the shard as one range per dim of the whole shape; None if not contiguous."""


class _TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    def names(self) -> Collection[str]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor: ...


class _LiveTensorSource:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        return self.tensors[name][slices]


def materialize(
    module: torch.nn.Module,
    spec: ProgramSpec,
    source: Source,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    strict: bool = True,
    part: ShardSelector | None = None,
) -> None:
    """Load the state of a stage module on the module's device; every tensor is a copy.

    source: tensors by original name; or a safetensors file or folder (also a sharded Hugging Face
    checkpoint), of which only this rank's part of this stage's tensors is read; or a function
    ``(name, meta tensor) -> tensor``. The random numbers of such a function are seeded by the
    program's seed and the name, so they do not depend on the plan. At most one whole tensor is in
    memory beside the loaded state, or one block for
    :class:`~fxpart.codegen.blockwise_init.InBlocks`. constants: tensors that no checkpoint stores
    (lifted constants, non-persistent buffers). strict: reject names that the model does not know.
    part: selects this rank's shard of a whole tensor, for stages on several ranks. Floating-point
    tensors are converted to the stage's dtype. Raise FXP110 with all problems at once, before
    anything changes.
    """
    index = module.INDEX
    assert isinstance(index, int)
    stage = spec.stages[index]
    work = _StageMaterializer(module, spec, stage, constants or {}, part)
    if callable(source) and not isinstance(source, Mapping):
        made = work.called(source)
    else:
        made = work.read(_open(source), strict)
    for attribute, value in made.items():
        setattr(module, attribute, value)


def unused_state(
    source: Source, spec: ProgramSpec, wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return state that no stage uses but that a whole checkpoint stores, as far as available.

    wanted: meta tensors with its shape and dtype, by main name.
    """
    if callable(source) and not isinstance(source, Mapping):
        return {name: _seeded(source, spec, name, like.to("meta")) for name, like in wanted.items()}
    tensors = _open(source)
    stored = stored_names(spec, tensors.names())
    found = {name: tensors.read(stored[name]) for name in wanted if name in stored}
    return {n: t.detach().clone() for n, t in found.items() if t.shape == wanted[n].shape}


def _open(source: Mapping[str, torch.Tensor] | str | Path) -> _TensorSource:
    return _LiveTensorSource(source) if isinstance(source, Mapping) else TensorFiles(source)


@dataclass(frozen=True)
class _StageMaterializer:
    """Loads the state of one stage."""

    module: torch.nn.Module
    spec: ProgramSpec
    stage: StageSpec
    constants: Mapping[str, torch.Tensor]
    part: ShardSelector | None

    def read(self, tensors: _TensorSource, strict: bool) -> dict[str, torch.Tensor]:
        """Return values by attribute from named tensors; all are checked before any is read."""
        stored = stored_names(self.spec, tensors.names())
        problems: list[Problem] = []
        missing: list[str] = []
        for state in self.stage.state:
            if state.name in stored:
                shape, dtype = tensors.shape(stored[state.name]), tensors.dtype(stored[state.name])
                problems += self._faults(state, shape, dtype)
            elif state.name not in self.constants:
                missing.append(state.name)
        if missing:
            fix = "load a checkpoint of this model, with the names of model.state_dict()"
            what = f"{len(missing)} missing"
            problems.append(_problem(self.stage, what, _list(missing), fix))
        if strict:
            problems += _unknown(self.stage, self.spec, set(stored.values()), tensors.names())
        made: dict[str, torch.Tensor] = {}
        for state in () if problems else self.stage.state:
            if state.name not in stored:
                made[state.attribute] = self._value(state, self.constants[state.name])
                continue
            name, shape = stored[state.name], _whole(self.spec, state)
            slices = None if self.part is None else self.part.slices(state.name, shape)
            cut = slices is not None
            tensor = tensors.read_part(name, slices) if slices is not None else tensors.read(name)
            if is_fake(tensor):
                problems += self._empty(state)
            else:
                own = not isinstance(tensors, _LiveTensorSource)
                made[state.attribute] = self._value(state, tensor, cut=cut, own=own)
        if problems:
            raise FxpartError(problems)
        return made

    def called(self, init: Init) -> dict[str, torch.Tensor]:
        """Return values by attribute, from an init function."""
        made: dict[str, torch.Tensor] = {}
        problems: list[Problem] = []
        for state in self.stage.state:
            if state.name in self.constants:
                made[state.attribute] = self._value(state, self.constants[state.name])
                continue
            shape, dtype = _whole(self.spec, state), getattr(torch, state.dtype)
            meta = torch.empty(shape, dtype=dtype, device="meta")
            slices = None
            if isinstance(init, InBlocks) and self.part is not None:
                slices = self.part.slices(state.name, shape)
            value: Any = _seeded(init, self.spec, state.name, meta, slices)
            if not isinstance(value, torch.Tensor):
                why = f"the init function returned {type(value).__name__}"
                fix = "return a tensor for every name"
                problems.append(_problem(self.stage, state.name, why, fix))
                continue
            found = self._empty(state) if is_fake(value) else []
            cut = slices is not None and value.shape == meta[slices].shape
            whole = shape if cut else tuple(value.shape)
            found = found or self._faults(state, whole, value.dtype)
            problems += found
            if not found:
                new = cut or (isinstance(init, InBlocks) and init.divides(meta))
                own = new and value.untyped_storage().nbytes() == value.nbytes
                made[state.attribute] = self._value(state, value, cut=cut, own=own)
        if problems:
            raise FxpartError(problems)
        return made

    def _value(
        self, state: StateSpec, tensor: torch.Tensor, *, cut: bool = False, own: bool = False
    ) -> torch.Tensor:
        """Return the value that replaces the empty tensor.

        cut: the tensor is already this rank's shard. own: no copy is needed because nothing else
        uses it.
        """
        if self.part is not None and not cut:
            part = self.part(state.name, tensor)
            # A view of the whole would keep it in memory.
            own = own and part.untyped_storage().nbytes() == part.nbytes
            tensor = part
        dtype: torch.dtype = getattr(torch, state.dtype)
        device: Any = self.module.device
        value = tensor.detach().to(device=device, dtype=dtype, copy=not own)
        if state.kind == "parameter":
            return torch.nn.Parameter(value, requires_grad=state.requires_grad)
        return value

    def _faults(
        self, state: StateSpec, found: tuple[int, ...], dtype: torch.dtype
    ) -> list[Problem]:
        whys = []
        shape = _whole(self.spec, state)
        if found != shape:
            whys.append(f"its shape is {list(found)}, but the model needs {list(shape)}")
        wanted: torch.dtype = getattr(torch, state.dtype)
        if dtype != wanted and not (dtype.is_floating_point and wanted.is_floating_point):
            whys.append(f"its dtype is {dtype}, but the model needs {wanted}")
        return [_problem(self.stage, state.name, why, "load weights of this model") for why in whys]

    def _empty(self, state: StateSpec) -> list[Problem]:
        why = "it has no data (a meta tensor)"
        return [_problem(self.stage, state.name, why, "load real weights")]


def _seeded(
    init: Init,
    spec: ProgramSpec,
    name: str,
    meta: torch.Tensor,
    slices: tuple[slice, ...] | None = None,
) -> torch.Tensor:
    """Call the init function with the random generator seeded by name, independent of the plan.

    slices: the part to create, for functions that create tensors in blocks.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator, before = torch.default_generator, torch.default_generator.get_state()
    number = int.from_bytes(digest, "little")

    def block(index: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        generator.manual_seed(mix(spec.seed, number, *([index] if index else [])))
        return make()

    try:
        if isinstance(init, InBlocks):
            return init.part(name, meta, slices, block)
        return block(0, lambda: init(name, meta))
    finally:
        generator.set_state(before)


def _whole(spec: ProgramSpec, state: StateSpec) -> tuple[int, ...]:
    """Return the shape of the whole tensor, as stored in checkpoints."""
    held = None if spec.sharding is None else spec.sharding.state.get(state.name)
    return state.shape if held is None else held.shape


def constants_of(spec: ProgramSpec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with data that no checkpoint stores, by main name, sorted."""
    names = {s.name for stage in spec.stages for s in stage.state if not s.persistent}
    return {n: state[n] for n in sorted(names) if n in state and not is_fake(state[n])}


def _unknown(
    stage: StageSpec, spec: ProgramSpec, used: set[str], names: Iterable[str]
) -> list[Problem]:
    known = {s.name for part in spec.stages for s in part.state}
    known |= {*spec.unused, *spec.aliases, *used}
    extra = [name for name in names if name not in known]
    if not extra:
        return []
    fix = "load a checkpoint of this model, or pass strict=False to ignore them"
    return [_problem(stage, f"{len(extra)} unknown to the model", _list(extra), fix)]


def _problem(stage: StageSpec, what: str, why: str, fix: str) -> Problem:
    return Problem("FXP110", f"stage {stage.index}: {what}", why, fix)


def _list(names: list[str]) -> str:
    shown = "\n".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}\nand {len(names) - _SHOWN} more"


def stored_names(spec: ProgramSpec, stored: Collection[str]) -> dict[str, str]:
    """Return the checkpoint name of each stored tensor of the program, by main name.

    A tied tensor may be stored under any of its names. If more names match after removing a common
    prefix of the model's names ("transformer.", for a checkpoint of the base model) or after adding
    a prefix of the checkpoint ("module."), that prefix is removed or added. The result is the same
    on every rank.
    """
    aliases: dict[str, list[str]] = {}
    for alias, main in spec.aliases.items():
        aliases.setdefault(main, []).append(alias)
    held = (s.name for stage in spec.stages for s in stage.state)
    mains = list(dict.fromkeys((*held, *spec.unused)))
    names = {main: (main, *aliases.get(main, ())) for main in mains}
    there = set(stored)

    def found(change: Callable[[str], str]) -> dict[str, str]:
        fitting = {}
        for main, known in names.items():
            hit = next((n for n in map(change, known) if n in there), None)
            if hit is None:  # names without the prefix, such as the head on top of a base model
                hit = next((n for n in known if n in there), None)
            if hit is not None:
                fitting[main] = hit
        return fitting

    best = found(lambda name: name)
    if len(best) == len(names):
        return best
    for prefix in _heads(name for known in names.values() for name in known):
        other = found(lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
        best = other if len(other) > len(best) else best
    for prefix in _heads(stored):
        other = found(lambda name, prefix=prefix: prefix + name)  # type: ignore[misc]
        best = other if len(other) > len(best) else best
    return best


def _heads(names: Iterable[str]) -> list[str]:
    """Return the leading components of dotted names, each with its trailing dot."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        for count in range(1, min(_DEPTH, len(words) - 1) + 1):
            found[".".join(words[:count]) + "."] = None
    return sorted(found)
