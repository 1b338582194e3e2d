"""What autograd saves of a stage's forward: of its weights, where to find them in the backward.

Autograd saves weights as they are, as views (a linear layer's transposed weight) and cast, under
autocast. Kept as they are they would bind the backward to the forward's weights, and an update in
place in between would be an error. The hooks below keep a recipe instead: which parameter, and
which part of it; the backward makes it from whatever the parameter's data then are.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fxpart.compat import view_base, writes
from fxpart.errors import error


class Part(NamedTuple):
    """A view of a parameter, or of it cast to another dtype.

    microbatch: whose forward saved it. size, stride: in elements of ``dtype``. offset: in bytes,
    from where the parameter begins. cast: the dtype to which the values are converted first.
    """

    microbatch: int
    parameter: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    cast: torch.dtype | None = None
    conjugated: bool = False
    negated: bool = False

    def make(self) -> torch.Tensor:
        """The view, of what the parameter's data are now."""
        whole = self.parameter.detach()
        if self.cast is not None:
            whole = whole.to(self.cast)
        if self.dtype == whole.dtype:
            found = whole
            if self.offset or self.stride != whole.stride() or self.size != whole.size():
                start = whole.storage_offset() + self.offset // whole.element_size()
                found = whole.as_strided(self.size, self.stride, start)
        else:
            found = torch.empty(0, dtype=self.dtype, device=whole.device)
            begin = whole.storage_offset() * whole.element_size() + self.offset
            found.set_(
                whole.untyped_storage(), begin // found.element_size(), self.size, self.stride
            )
        found = found.conj() if self.conjugated else found
        return -found if self.negated else found


class SavedWeights:
    """The saved-tensor hooks of one stage.

    follows: whether what a forward casts from a parameter alone is made again too, so that the
    backward sees its own weights in it. Otherwise it stays as the forward made it, and so does
    all else that a forward computes from weights (a normed weight, several put side by side).
    reading: the microbatch whose backward runs, for which parameters hold what it is to see; -1
    if none.
    """

    def __init__(self, follows: bool, where: str) -> None:
        """where: the stage, in messages."""
        self.follows = follows
        self.reading = -1
        self._where = where

    def hooks(
        self, parameters: Iterable[torch.Tensor], microbatch: int
    ) -> AbstractContextManager[Any]:
        """The context of a forward. parameters: those that hold its weights, on every device.

        A tensor that is no weight is kept as it is; FXP109 if it was written when it is asked for,
        which autograd itself looks after only where there are no hooks.
        """
        where: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            address = parameter.untyped_storage().data_ptr()
            if address:  # otherwise it has no elements
                where.setdefault(address, []).append(parameter)
        dtypes = {p.dtype for found in where.values() for p in found}
        plain = dtypes.pop() if len(dtypes) == 1 else None

        def pack(tensor: torch.Tensor) -> Any:
            try:
                found = where.get(tensor.untyped_storage().data_ptr())
            except NotImplementedError:  # sparse: no storage, so no view of a parameter
                found = None
            if found is not None:
                return _part(tensor, found, microbatch)
            if tensor.is_leaf:
                return tensor, writes(tensor)
            if self.follows and tensor.dtype is not plain:
                made = _cast(tensor, where, microbatch)
                if made is not None:
                    return made
            # Detached: an op that saves its own result would keep itself alive.
            return tensor.detach(), writes(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if type(kept) is Part:
            if kept.microbatch != self.reading:
                raise error(
                    "FXP900",
                    where=self._where,
                    why=f"a weight that microbatch {kept.microbatch} used was asked for while "
                    f"weights were set for {'none' if self.reading < 0 else self.reading}",
                    fix="",
                )
            return kept.make()
        tensor, version = kept
        if writes(tensor) != version:
            raise error(
                "FXP109",
                where=self._where,
                why=f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed "
                "in place after the forward had used it",
                fix="do not write it in place, or train synchronously: weights='flush'",
            )
        return tensor  # type: ignore[no-any-return]


def _part(tensor: torch.Tensor, among: list[torch.Tensor], microbatch: int) -> Part:
    """Where a tensor lies in a parameter; among: all parameters in its storage."""
    begin = tensor.storage_offset() * tensor.element_size()
    parameter, start = among[0], among[0].storage_offset() * among[0].element_size()
    for other in among[1:]:  # the last that begins before it
        at = other.storage_offset() * other.element_size()
        if start < at <= begin:
            parameter, start = other, at
    return Part(
        microbatch,
        parameter,
        tensor.size(),
        tensor.stride(),
        int(begin - start),
        tensor.dtype,
        None,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _cast(
    tensor: torch.Tensor, where: dict[int, list[torch.Tensor]], microbatch: int
) -> Part | None:
    """How to make a tensor again that is a parameter cast, or a view of one."""
    base = view_base(tensor)
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0" or base.dtype != tensor.dtype:
        return None
    parameter = getattr(made_by.next_functions[0][0], "variable", None)
    if parameter is None or base.stride() != parameter.stride():
        return None
    if not any(parameter is p for p in where.get(parameter.untyped_storage().data_ptr(), ())):
        return None
    offset = int((tensor.storage_offset() - base.storage_offset()) * base.element_size())
    return Part(
        microbatch, parameter, tensor.size(), tensor.stride(), offset, tensor.dtype, base.dtype
    )
