"""The one place that touches torch's private names; each function says what it needs and falls back."""

from __future__ import annotations

from typing import Any

import torch


def storage_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key equal for two tensors that are the same view of one storage, meta tensors included.

    Uses the storage's C++ address (``_cdata``), because the data pointer of a meta tensor is 0;
    falls back to the data pointer, or to the tensor's own identity where there is none.
    """
    layout = (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )
    storage = tensor.untyped_storage()
    address = getattr(storage, "_cdata", None) or storage.data_ptr() or id(tensor)
    return (address, *layout)


def fake_mode(*, symbolic: bool = False) -> Any:
    """A FakeTensorMode that also takes real tensors; with symbolic shapes when asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv() if symbolic else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data: a meta or a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def unflatten_output(exported: torch.export.ExportedProgram, leaves: list[Any]) -> Any:
    """``leaves`` put into the structure that the exported module's forward returned."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, exported.call_spec.out_spec)


def symbol_names(size: int | torch.SymInt) -> str | int:
    """A dim as a program writes it: an int, or the expression's text such as "s0*s1"."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else str(expression)
    return int(size)


def size_hint(size: int | torch.SymInt) -> int:
    """The size that a dim had when it was traced."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint)
    return int(size)
