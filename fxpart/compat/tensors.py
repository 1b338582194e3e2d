"""Tensors: storage, fakes, views."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpart.compat.tracers import pause_tracing


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


def storage_address(tensor: torch.Tensor) -> object:
    """Equal for two tensors that share storage, while both are alive (``_cdata``)."""
    storage = tensor.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr() or id(tensor)


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this one is a view (``_base``), or itself."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def get_write_count(tensor: torch.Tensor) -> int:
    """How often the tensor, or another view of its storage, was written (``_version``)."""
    return tensor._version


def fake_mode(*, symbolic: bool = False) -> Any:
    """A FakeTensorMode that also takes real tensors; with symbolic shapes when asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not symbolic:
        return FakeTensorMode(allow_non_fake_inputs=True)
    # What torch.export itself gives its mode; without these it refuses symbolic inputs.
    env = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, export=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data: a meta or a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def detach_constant(fake: Any) -> None:
    """Give a fake tensor whose value is known (``FakeTensor.constant``) a value of its own.

    Fake modes run operations on known values for real: in place, they would write the user's.
    """
    known = getattr(fake, "constant", None)
    if isinstance(known, torch.Tensor):
        fake.constant = known.detach().clone()


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a strided fake tensor whose value nobody knows (``FakeTensor.constant``)."""
    from torch._subclasses.fake_tensor import FakeTensor

    plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return plain and getattr(tensor, "constant", None) is None


def like_fake(fake: Any) -> torch.Tensor:
    """A new fake tensor with the metadata of ``fake``, its gradient's too, and a new storage.

    With a gradient it is no leaf, as the result of an op is none. Not recorded by tracers.
    """
    with pause_tracing(), fake.fake_mode:
        made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
        if fake.requires_grad:
            made.requires_grad_()
            made = made if fake.is_leaf else made.clone()
    return made


@contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Failing fake kernels raise as ever, but torch does not also log a stack trace for each.

    For a first try that another follows. Filters the private logger ``torch._subclasses.
    fake_tensor``; where that is gone there is nothing to filter.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def without_traces(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(without_traces)
    try:
        yield
    finally:
        logger.removeFilter(without_traces)
