"""Replace meta and fake tensors of a model by fake tensors of one mode during capture.

The fakes are on the CPU (or on the fake's own device), so that the graph has a real device instead
of "meta".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fxpart.compat import disable_guards, fake_mode, is_fake, storage_identity, tensor_slots
from fxpart.compiler.graph_edit import fake_mode as fake_mode_of
from fxpart.compiler.size_symbols import expression


def has_no_data(model: nn.Module, tensors: Sequence[torch.Tensor] = ()) -> bool:
    """Return whether any parameter, buffer or given tensor is a meta or fake tensor."""
    own = (*model.parameters(), *model.buffers())
    return any(is_fake(t) for t in (*own, *tensors))


def make_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of ``mode`` with the metadata of ``tensor``; a Parameter stays one."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor for a fake one; other tensors unchanged."""
    if not is_fake(tensor) or tensor.device.type == "meta":
        return tensor
    meta = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def number_fixed_sizes(graph: fx.GraphModule) -> None:
    """Write sizes that a later operation of the graph has fixed as numbers.

    torch.export leaves a symbol in values that it traced before the operation, such as a recurrent
    layer, took the size as a number; only the symbol's expression is then one.
    """
    mode: Any = fake_mode_of(graph.graph)

    def numbered(held: Any) -> Any:
        if not isinstance(held, torch.Tensor):
            return held
        given = (*held.shape, *held.stride(), held.storage_offset())
        sizes = [int(s) if expression(s).is_number else s for s in given]
        if all(new is old for new, old in zip(sizes, given, strict=True)):
            return held
        with mode, disable_guards(mode), torch.no_grad():
            found = held.as_strided(sizes[: held.dim()], sizes[held.dim() : -1], sizes[-1])
        return found.requires_grad_(held.requires_grad)

    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = fx.node.map_aggregate(node.meta["val"], numbered)


@contextmanager
def replace_with_fakes(model: nn.Module) -> Iterator[Any | None]:
    """Replace every tensor of a model without data by fakes of one mode; ties are kept.

    Yield that mode, or None for a model with data, which is unchanged.
    """
    if not has_no_data(model):
        yield None
        return
    mode = fake_mode(symbolic=True)
    fakes: dict[tuple[object, ...], torch.Tensor] = {}
    replaced = []
    for slots, name in tensor_slots(model):
        tensor = slots[name]
        key = storage_identity(tensor)
        if key not in fakes:
            fakes[key] = make_fake(mode, tensor)
        replaced.append((slots, name, tensor))
        slots[name] = fakes[key]
    try:
        yield mode
    finally:
        for slots, name, tensor in replaced:
            slots[name] = tensor
