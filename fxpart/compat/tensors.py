"""Tensors: storage, fakes and views."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpart.compat.tracers import pause_tracing


def storage_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key equal for two tensors that are the same view of one storage.

    Uses the storage's C++ address (``_cdata``), because the data pointer of a meta tensor is 0;
    falls back to the data pointer, or to the tensor's identity.
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
    """Return a key equal for two live tensors that share storage (``_cdata``)."""
    storage = tensor.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr() or id(tensor)


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which this one is a view (``_base``), or itself."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def get_write_count(tensor: torch.Tensor) -> int:
    """Return how often the tensor, or another view of its storage, was written (``_version``)."""
    return tensor._version


def set_write_count(tensor: torch.Tensor, count: int) -> None:
    """Set what :func:`get_write_count` returns, where writes are undone.

    Uses ``torch._C._autograd._unsafe_set_version_counter``.
    """
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (count,))


def fake_mode(*, symbolic: bool = False) -> Any:
    """Return a FakeTensorMode that also accepts real tensors; optionally with symbolic shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not symbolic:
        return FakeTensorMode(allow_non_fake_inputs=True)
    # Like torch.export's own mode; otherwise it rejects symbolic inputs.
    env = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, export=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has no data: a meta or a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def detach_constant(fake: Any) -> None:
    """Give a fake tensor with a known value (``FakeTensor.constant``) its own copy of it.

    Fake modes run operations on known values; in place, they would write the user's tensor.
    """
    known = getattr(fake, "constant", None)
    if isinstance(known, torch.Tensor):
        fake.constant = known.detach().clone()


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Return whether it is a strided fake tensor without a known value
    (``FakeTensor.constant``).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return plain and getattr(tensor, "constant", None) is None


def like_fake(fake: Any) -> torch.Tensor:
    """Return a new fake tensor with the metadata of ``fake`` and a new storage.

    With a gradient it is not a leaf unless ``fake`` is. Tracers do not record it.
    """
    with pause_tracing(), fake.fake_mode:
        made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
        if fake.requires_grad:
            made.requires_grad_()
            made = made if fake.is_leaf else made.clone()
    return made


@contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Suppress torch's logged stack traces of failing fake kernels, which still raise.

    For a first attempt that another follows. Filters the private logger
    ``torch._subclasses.fake_tensor``; does nothing if that is missing.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def without_traces(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(without_traces)
    try:
        yield
    finally:
        logger.removeFilter(without_traces)
