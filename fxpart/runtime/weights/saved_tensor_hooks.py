"""Saved-tensor hooks that store references to weights instead of weights.

Autograd saves weights directly, as views (a linear layer's transposed weight), or cast under
autocast. Stored directly they would bind the backward to the forward's weights, and an update in
place in between would be an error. These hooks store which parameter and which part of it was
saved; the backward rebuilds the tensor from the parameter's data at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from fxpart.compat import get_write_count, view_base
from fxpart.errors import FxpartError, error
from fxpart.runtime.weights.weight_stash import Tensors, swap_parameter_data
from fxpart.schedule.weight_modes import FLUSH


class ParameterView(NamedTuple):
    """A view of a parameter, or of a cast of it.

    at: index of the parameter. size, stride: in elements of ``dtype``. offset: in bytes, from the
    begin of the parameter. cast: dtype to convert to first. conjugated, negated: as
    ``Tensor.is_conj`` and ``Tensor.is_neg``.
    """

    at: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    cast: torch.dtype | None = None
    conjugated: bool = False
    negated: bool = False

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of the parameter's current data."""
        whole = parameter.detach()
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


class SavedWeightHooks:
    """Saved-tensor hooks of one stage.

    parameters: contain its weights while it runs. follows: whether casts of a parameter are rebuilt
    too, so that the backward reads its own weights in them. Otherwise they stay as the forward
    computed them, as does everything else computed from weights (a normalized weight, a
    concatenation).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], follows: bool, where: str) -> None:
        """Create the hooks. where: the stage, for messages."""
        self.parameters = parameters
        self.follows = follows
        dtypes = {p.dtype for p in parameters}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._where = where
        self._places = {id(p): at for at, p in enumerate(parameters)}
        self._full_views = [
            ParameterView(at, p.size(), p.stride(), 0, p.dtype) for at, p in enumerate(parameters)
        ]
        self._reading = -1
        self._own = False
        self._addresses: list[int] = []
        self._views: dict[ParameterView, torch.Tensor] = {}

    @contextmanager
    def reading(self, microbatch: int, *, own: bool) -> Iterator[None]:
        """Enter for a backward, with the weights that it reads in the parameters.

        own: the parameters contain their own data, so views created earlier stay valid.
        """
        if own:
            addresses = [p.data_ptr() for p in self.parameters]
            if addresses != self._addresses:  # the parameters were given other tensors
                self._addresses, self._views = addresses, {}
        self._reading, self._own = microbatch, own
        try:
            yield
        finally:
            self._reading = -1

    def hooks(self, microbatch: int) -> AbstractContextManager[Any]:
        """Return the context of a forward, with the weights that it reads in the parameters.

        A tensor that is not a weight is stored directly; FXP109 if it was modified in place before
        the backward, which autograd itself detects only without hooks.
        """

        def unpack(packed: Any) -> torch.Tensor:
            return self.unpack(packed, microbatch)

        return torch.autograd.graph.saved_tensors_hooks(self.packing(), unpack)

    def packing(self) -> Callable[[torch.Tensor], Any]:
        """Return the function that packs a tensor saved by a forward, for :meth:`unpack`.

        The parameters must contain the weights that the forward reads.
        """
        where: dict[int, int] = {}
        for at, parameter in enumerate(self.parameters):
            address = parameter.untyped_storage().data_ptr()
            if address:  # otherwise it has no elements
                where[address] = -1 if address in where else at
        full_views, parameters = self._full_views, self.parameters
        follows, only_dtype = self.follows, self._dtype

        def pack(tensor: torch.Tensor) -> Any:
            try:
                found = where.get(tensor.untyped_storage().data_ptr())
            # sparse tensors have no storage and are no views of a parameter
            except NotImplementedError:
                found = None
            if found is not None:
                return (
                    full_views[found]
                    if tensor is parameters[found]
                    else self._locate(tensor, found)
                )
            if follows and tensor.dtype is not only_dtype:
                cast_view = self._cast(tensor)
                if cast_view is not None:
                    return cast_view
            # Detached, because an op that saves its own result would keep itself alive.
            return tensor.detach(), get_write_count(tensor)

        return pack

    def unpack(self, packed: Any, microbatch: int) -> torch.Tensor:
        """Return the saved tensor for a microbatch's backward, with weights from the parameters."""
        if type(packed) is ParameterView:
            return self._view(packed, microbatch)
        tensor, version = packed
        if get_write_count(tensor) != version:
            raise self._make_modified_error(tensor)
        return tensor  # type: ignore[no-any-return]

    def _view(self, part: ParameterView, microbatch: int) -> torch.Tensor:
        """Return the tensor for a parameter view in the current backward."""
        if self._reading != microbatch:
            raise error(
                "FXP900",
                where=self._where,
                why=f"a weight of microbatch {microbatch} was read while the weights were set for "
                f"microbatch {'none' if self._reading < 0 else self._reading}",
                fix="",
            )
        if not self._own or part.cast is not None or part.negated:
            return part.of(self.parameters[part.at])
        found = self._views.get(part)
        if found is None:
            found = self._views[part] = part.of(self.parameters[part.at])
        return found

    def _locate(self, tensor: torch.Tensor, at: int) -> ParameterView:
        """Locate a tensor in a parameter. at: index, or -1 if several parameters share the
        storage.
        """
        begin = int(tensor.storage_offset() * tensor.element_size())
        at = self._find_parameter(tensor, begin) if at < 0 else at
        parameter = self.parameters[at]
        begin -= int(parameter.storage_offset() * parameter.element_size())
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        if not parameter.is_complex() and not dtype.is_complex:
            return ParameterView(at, size, stride, begin, dtype)
        flags = tensor.is_conj(), tensor.is_neg()
        return ParameterView(at, size, stride, begin, dtype, None, *flags)

    def _find_parameter(self, tensor: torch.Tensor, begin: int) -> int:
        """Return the last parameter in the tensor's storage that begins at or before it."""
        address = tensor.untyped_storage().data_ptr()
        starts = [
            (p.storage_offset() * p.element_size(), at)
            for at, p in enumerate(self.parameters)
            if p.untyped_storage().data_ptr() == address
        ]
        return max((s for s in starts if s[0] <= begin), default=min(starts))[1]

    def _cast(self, tensor: torch.Tensor) -> ParameterView | None:
        """Return how to rebuild a cast of a parameter, or a view of one; None for other tensors."""
        base = view_base(tensor)
        made_by = base.grad_fn
        if made_by is None or made_by.name() != "ToCopyBackward0" or base.dtype != tensor.dtype:
            return None
        parameter = getattr(made_by.next_functions[0][0], "variable", None)
        if parameter is None or base.stride() != parameter.stride():
            return None
        at = self._places.get(id(parameter))
        if at is None:
            return None
        begin = int((tensor.storage_offset() - base.storage_offset()) * base.element_size())
        return ParameterView(at, tensor.size(), tensor.stride(), begin, tensor.dtype, base.dtype)

    def _make_modified_error(self, tensor: torch.Tensor) -> FxpartError:
        return error(
            "FXP109",
            where=self._where,
            why=f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified in "
            "place after the forward used it",
            fix=f"do not modify it in place, or train synchronously with weights={FLUSH!r}",
        )


class ForwardRecomputation:
    """Recomputation of a stage's forwards in their backwards, with the forwards' weights.

    Used by :class:`~fxpart.runtime.executor.recompute.StageRecomputation`. Recomputed activations
    must equal the original ones, so the parameters contain the forward's weights meanwhile. Tensors
    that autograd saves there are packed by :class:`SavedWeightHooks`, so the backward reads its own
    weights and the forward's activations, as without recomputation.
    """

    def __init__(self, saved: SavedWeightHooks, parameters: Sequence[torch.Tensor]) -> None:
        """Create the context. parameters: have other weights in a forward than in its backward."""
        self._saved = saved
        self._parameters = parameters
        self._microbatch = -1
        self._tensors: Tensors | None = None

    @contextmanager
    def during(self, microbatch: int, tensors: Tensors | None) -> Iterator[None]:
        """Enter for a backward. tensors: weights of its forward, or None if equal."""
        self._microbatch, self._tensors = microbatch, tensors
        try:
            yield
        finally:
            self._microbatch, self._tensors = -1, None

    @contextmanager
    def forward_weights(self) -> Iterator[Callable[[torch.Tensor], Any] | None]:
        """Enter for a recomputed forward; yield the function that packs saved tensors, or None."""
        if self._tensors is None:
            yield None
            return
        with swap_parameter_data(self._parameters, self._tensors):
            yield self._saved.packing()

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a saved tensor as the current backward reads it."""
        return self._saved.unpack(packed, self._microbatch)
