"""What autograd saves of a stage's forward: of its weights, where to find them in the backward.

Autograd saves weights as they are, as views (a linear layer's transposed weight) and cast, under
autocast. Kept as they are they would bind the backward to the forward's weights, and an update in
place in between would be an error. The hooks below keep a recipe instead: which parameter, and
which part of it; the backward makes it from whatever the parameter's data then are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from fxpart.compat import get_write_count, view_base
from fxpart.errors import FxpartError, error
from fxpart.schedule.weight_modes import FLUSH


class ParameterView(NamedTuple):
    """A view of a parameter, or of it cast to another dtype.

    at: the parameter's place. size, stride: in elements of ``dtype``. offset: in bytes, from where
    the parameter begins. cast: the dtype to which the values are converted first. conjugated,
    negated: as ``Tensor.is_conj`` and ``Tensor.is_neg``.
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
        """The view, of what the parameter's data are now."""
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
    """The saved-tensor hooks of one stage.

    parameters: that hold its weights while it runs. follows: whether what a forward casts from a
    parameter alone is made again too, so that the backward sees its own weights in it. Otherwise it
    stays as the forward made it, and so does all else that a forward computes from weights (a
    normed weight, several put side by side).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], follows: bool, where: str) -> None:
        """where: the stage, in messages."""
        self.parameters = parameters
        self.follows = follows
        dtypes = {p.dtype for p in parameters}
        self._plain = dtypes.pop() if len(dtypes) == 1 else None
        self._where = where
        self._places = {id(p): at for at, p in enumerate(parameters)}
        self._wholes = [
            ParameterView(at, p.size(), p.stride(), 0, p.dtype) for at, p in enumerate(parameters)
        ]
        self._reading = -1
        self._own = False
        self._addresses: list[int] = []
        self._views: dict[ParameterView, torch.Tensor] = {}

    @contextmanager
    def reading(self, microbatch: int, *, own: bool) -> Iterator[None]:
        """Around a backward, for which the parameters hold what it is to see.

        own: that is their own data, of which views that were made once stay good.
        """
        if own:
            addresses = [p.data_ptr() for p in self.parameters]
            if addresses != self._addresses:  # somebody put other tensors there
                self._addresses, self._views = addresses, {}
        self._reading, self._own = microbatch, own
        try:
            yield
        finally:
            self._reading = -1

    def hooks(self, microbatch: int) -> AbstractContextManager[Any]:
        """The context of a forward, for which the parameters hold what it is to read.

        A tensor that is no weight is kept as it is; FXP109 if it was written when it is asked for,
        which autograd itself looks after only where there are no hooks.
        """

        def unpack(kept: Any) -> torch.Tensor:
            return self.unpack(kept, microbatch)

        return torch.autograd.graph.saved_tensors_hooks(self.packing(), unpack)

    def packing(self) -> Callable[[torch.Tensor], Any]:
        """What turns a tensor that a forward saves into what is kept of it.

        The parameters hold what that forward reads. What it returns is for :meth:`unpack`.
        """
        where: dict[int, int] = {}
        for at, parameter in enumerate(self.parameters):
            address = parameter.untyped_storage().data_ptr()
            if address:  # otherwise it has no elements
                where[address] = -1 if address in where else at
        wholes, parameters = self._wholes, self.parameters
        follows, plain = self.follows, self._plain

        def pack(tensor: torch.Tensor) -> Any:
            try:
                found = where.get(tensor.untyped_storage().data_ptr())
            except NotImplementedError:  # sparse: no storage, so no view of a parameter
                found = None
            if found is not None:
                return wholes[found] if tensor is parameters[found] else self._part(tensor, found)
            if follows and tensor.dtype is not plain:
                made = self._cast(tensor)
                if made is not None:
                    return made
            # Detached: an op that saves its own result would keep itself alive.
            return tensor.detach(), get_write_count(tensor)

        return pack

    def unpack(self, kept: Any, microbatch: int) -> torch.Tensor:
        """The tensor in a microbatch's backward: a weight is what the parameters hold by then."""
        if type(kept) is ParameterView:
            return self._view(kept, microbatch)
        tensor, version = kept
        if get_write_count(tensor) != version:
            raise self._changed(tensor)
        return tensor  # type: ignore[no-any-return]

    def _view(self, part: ParameterView, microbatch: int) -> torch.Tensor:
        """What stands for a part in the backward that runs."""
        if self._reading != microbatch:
            raise error(
                "FXP900",
                where=self._where,
                why=f"a weight that microbatch {microbatch} used was asked for while weights were "
                f"set for {'none' if self._reading < 0 else self._reading}",
                fix="",
            )
        if not self._own or part.cast is not None or part.negated:
            return part.of(self.parameters[part.at])
        found = self._views.get(part)
        if found is None:
            found = self._views[part] = part.of(self.parameters[part.at])
        return found

    def _part(self, tensor: torch.Tensor, at: int) -> ParameterView:
        """Where a tensor lies in a parameter; at: -1 if several share its storage."""
        begin = int(tensor.storage_offset() * tensor.element_size())
        at = self._among(tensor, begin) if at < 0 else at
        parameter = self.parameters[at]
        begin -= int(parameter.storage_offset() * parameter.element_size())
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        if not parameter.is_complex() and not dtype.is_complex:
            return ParameterView(at, size, stride, begin, dtype)
        marks = tensor.is_conj(), tensor.is_neg()
        return ParameterView(at, size, stride, begin, dtype, None, *marks)

    def _among(self, tensor: torch.Tensor, begin: int) -> int:
        """The last of the parameters in a tensor's storage that begins where it does, or before."""
        address = tensor.untyped_storage().data_ptr()
        starts = [
            (p.storage_offset() * p.element_size(), at)
            for at, p in enumerate(self.parameters)
            if p.untyped_storage().data_ptr() == address
        ]
        return max((s for s in starts if s[0] <= begin), default=min(starts))[1]

    def _cast(self, tensor: torch.Tensor) -> ParameterView | None:
        """How to make a tensor again that is a parameter cast, or a view of one."""
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

    def _changed(self, tensor: torch.Tensor) -> FxpartError:
        return error(
            "FXP109",
            where=self._where,
            why=f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in "
            "place after the forward had used it",
            fix=f"do not write it in place, or train synchronously: weights={FLUSH!r}",
        )
