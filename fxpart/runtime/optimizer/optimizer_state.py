"""Optimizer state by original parameter name: gathered from all ranks, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from fxpart.errors import FxpartError, Problem
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.parameter_groups import ParameterGroup
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.runtime.transport.interface import Transport


class _StateValue(msgspec.Struct, frozen=True):
    """One value of one parameter's state: a tensor's dtype and shape, or a plain value.

    whole: its shape over all mesh ranks if it is divided as the parameter is.
    """

    name: str
    key: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value: Any = None
    mesh_rank: int = 0
    whole: tuple[int, ...] = ()


class _LocalOptimizerState(msgspec.Struct, frozen=True):
    """One process's state: values, options of each group, parameter names per group."""

    slots: tuple[_StateValue, ...]
    options: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]


def gather_optimizer_state(
    state: ModelState,
    shards: OptimizerShards,
    optimizer: torch.optim.Optimizer,
    *,
    first_only: bool,
) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [{options, "params": names}]}``.

    It is the same on every rank, or only on rank 0 (else empty). The state of a tied parameter is
    its owner's. Tensors are whole, independent of sharding.
    """
    transport = state.transport
    report, tensors = _describe_local(state, shards, optimizer)
    messages = transport.exchange_bytes(msgspec.json.encode(report))
    reports = [msgspec.json.decode(message, type=_LocalOptimizerState) for message in messages]
    found: dict[str, dict[str, Any]] = {}
    for process, theirs in enumerate(reports):
        mine = iter(tensors if len(reports) == 1 or process == transport.local[0] else ())
        for slot in theirs.slots:
            value = slot.value
            if slot.dtype:
                value = _broadcast_value(transport, slot, process, next(mine, None))
            slots, pieces = found.setdefault(slot.name, {}), shards.pieces(slot.name)
            layout = pieces.of_state(slot.whole) if slot.whole else None
            if layout is not None and len(pieces.sources) > 1:
                if slot.key not in slots:
                    slots[slot.key] = torch.empty(
                        layout.shape, dtype=value.dtype, device=value.device
                    )
                layout.put(slots[slot.key], slot.mesh_rank, value)
            else:
                slots[slot.key] = value
    if first_only and 0 not in transport.local:
        return {}
    order = [name for name in state.entries if name in found]
    return {
        "state": {name: found[name] for name in order},
        "param_groups": _merge_groups(reports, state),
    }


def rename_optimizer_state(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return gathered optimizer state with other names of some parameters."""
    if not names or not found:
        return dict(found)
    return {
        "state": {names.get(name, name): value for name, value in found["state"].items()},
        "param_groups": [
            {**group, "params": [names.get(name, name) for name in group["params"]]}
            for group in found["param_groups"]
        ],
    }


def merge_optimizers(optimizers: Mapping[Any, torch.optim.Optimizer]) -> Any:
    """Return one view of all: the same groups with all parameters, and all state."""
    first, *others = optimizers.values()
    if not others:
        return first
    groups = [dict(group) for group in first.param_groups]
    for index, group in enumerate(groups):
        group["params"] = list(group["params"])
        for other in others:
            group["params"] += other.param_groups[index]["params"]
    state: dict[torch.Tensor, Any] = {}
    for each in optimizers.values():
        state |= each.state
    return SimpleNamespace(param_groups=groups, state=state, state_dict=first.state_dict)


def plan_state_load(
    state: ModelState,
    shards: OptimizerShards,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    groups: Sequence[ParameterGroup] = (),
) -> Callable[[], None]:
    """Return a function that loads gathered state; FXP110 now for missing parameters.

    groups: of the whole model by name, if the user passed any. A group without parameters in this
    process takes its options by the names of other processes' parameters, or by its index.
    """
    place = {name: group for group in given["param_groups"] for name in group["params"]}
    wanted_names = [n for g in groups for n in g.names] if groups else list(state.trainable())
    missing = [name for name in wanted_names if name not in place]
    if missing:
        fix = "pass the optimizer state of the same model"
        raise FxpartError(
            Problem("FXP110", name, "the optimizer state does not have it", fix) for name in missing
        )
    owners = {
        id(shards.updated(tensor)): (name, mesh_rank)
        for name, entry in state.entries.items()
        if entry.trainable
        for (_, mesh_rank), tensor in entry.copies.items()
    }
    current = optimizer.state_dict()
    wanted: dict[int, Any] = {}
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        source = find_source_group(index, given["param_groups"], groups, place)
        for parameter in group["params"]:
            name, mesh_rank = owners.get(id(parameter), (None, 0))
            if name is not None:
                source = place[name]
                if name in given["state"]:
                    pieces = shards.pieces(name)
                    wanted[number] = {
                        k: _slice_value(pieces, mesh_rank, v) if isinstance(v, torch.Tensor) else v
                        for k, v in given["state"][name].items()
                    }
            number += 1
        target = current["param_groups"][index]
        target.update(
            {k: convert_option(target.get(k), v) for k, v in source.items() if k != "params"}
        )
    loaded = {"state": wanted, "param_groups": current["param_groups"]}
    return lambda: optimizer.load_state_dict(loaded)


def find_source_group(
    index: int,
    given: Sequence[Mapping[str, Any]],
    groups: Sequence[ParameterGroup],
    place: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Return the given group for one of the optimizer's groups without local parameters."""
    names = groups[index].names if groups else ()
    if names:
        return place[names[0]]
    return given[index] if index < len(given) else {}


def _describe_local(
    state: ModelState, shards: OptimizerShards, optimizer: torch.optim.Optimizer
) -> tuple[_LocalOptimizerState, list[torch.Tensor]]:
    """Return the state of the parameters that this process owns, each element once."""
    owned = {
        id(shards.updated(tensor)): (name, mesh_rank)
        for name, entry in state.entries.items()
        if entry.trainable
        for mesh_rank, tensor in entry.owned().items()
        if mesh_rank in shards.pieces(name).sources
    }
    slots: list[_StateValue] = []
    tensors: list[torch.Tensor] = []
    names: list[tuple[str, ...]] = []
    for group in optimizer.param_groups:
        mine = [(owned[id(p)], p) for p in group["params"] if id(p) in owned]
        names.append(tuple(dict.fromkeys(name for (name, _), _ in mine)))
        for (name, mesh_rank), parameter in mine:
            first = mesh_rank == shards.pieces(name).sources[0]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    # Momentum of sparse rows.
                    value = value.to_dense() if value.is_sparse else value
                    shape = tuple(value.shape)
                    layout = shards.pieces(name).of_local_state(shape, parameter.shape)
                    whole = layout.shape if shape and layout is not None else ()
                    if whole or first:
                        slots.append(
                            _StateValue(
                                name, key, str(value.dtype)[6:], shape, None, mesh_rank, whole
                            )
                        )
                        tensors.append(value)
                elif first:
                    slots.append(_StateValue(name, key, value=value))
    options = tuple(
        {k: _encode_option(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.state_dict()["param_groups"]
    )
    return _LocalOptimizerState(tuple(slots), options, tuple(names)), tensors


def _broadcast_value(
    transport: Transport, slot: _StateValue, process: int, mine: torch.Tensor | None
) -> torch.Tensor:
    if mine is None:
        tensor = torch.empty(slot.shape, dtype=torch_dtype(slot.dtype))
    else:
        tensor = mine.detach().clone().contiguous()
    return transport.broadcast(tensor, transport.local[0] if mine is not None else process)


def _merge_groups(reports: list[_LocalOptimizerState], state: ModelState) -> list[dict[str, Any]]:
    """Merge the groups of all processes by index, parameters in the model's order."""
    place = {name: index for index, name in enumerate(state.entries)}
    merged: list[dict[str, Any]] = []
    for report in reports:
        for index, (options, names) in enumerate(zip(report.options, report.names, strict=True)):
            if index == len(merged):
                merged.append({k: _decode_option(v) for k, v in options.items()} | {"params": []})
            known = [*merged[index]["params"], *names]
            merged[index]["params"] = list(dict.fromkeys(known))
    for group in merged:
        group["params"].sort(key=place.__getitem__)
    return merged


def _slice_value(pieces: ShardLayout, mesh_rank: int, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of the mesh rank's part of one value."""
    layout = pieces.of_state(value.shape) if value.dim() else None
    return (value if layout is None else layout.part(value, mesh_rank)).clone()


_TENSOR = "tensor"  # Marks an option that is a tensor in a message.


def _encode_option(value: Any) -> Any:
    """Convert an option to plain data; a learning rate may be a tensor, betas a tuple of them."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR: [str(value.dtype)[6:], value.detach().cpu().tolist()]}
    return [_encode_option(each) for each in value] if isinstance(value, (tuple, list)) else value


def _decode_option(value: Any) -> Any:
    """Convert an option from plain data; tensors are on the CPU, as in torch's checkpoints."""
    if isinstance(value, dict) and set(value) == {_TENSOR}:
        dtype, numbers = value[_TENSOR]
        return torch.tensor(numbers, dtype=torch_dtype(dtype))
    return [_decode_option(each) for each in value] if isinstance(value, list) else value


def convert_option(current: Any, value: Any) -> Any:
    """Convert an option to the type that the optimizer uses: JSON turns tuples into lists."""
    if isinstance(current, torch.Tensor):
        # Copy it: several groups, or the source of the state, could share it.
        made = torch.as_tensor(value, dtype=current.dtype, device=current.device)
        return made.detach().clone()
    if isinstance(current, tuple) and isinstance(value, (list, tuple)):
        if len(current) == len(value):
            return tuple(
                convert_option(mine, each) for mine, each in zip(current, value, strict=True)
            )
        return tuple(value)
    return value
