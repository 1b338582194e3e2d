"""Activation recomputation: forwards run again just before their backward.

"full": a piece of a stage (a block of the model, or the whole stage if its code has no blocks)
stores only its inputs. When the backward first reads a tensor that autograd would have saved, the
piece runs forward again. "selective": results of long products are stored too (linear layers,
convolutions, fused attention), so that only cheap ops run again: attention scores, activation
functions, norms, dropout (Korthikanti et al. 2022, section 5). A piece of which autograd saves only
weights, inputs and results, which are stored anyway, is not recomputed, unless it has collectives:
each mesh rank decides by itself, and all have to decide the same.

Results stay identical. The autograd graph is that of the plain forward, with handles for its saved
tensors. Random ops are seeded by the microbatch's key. State that a forward writes, such as
buffers, is restored to its earlier values while it runs again, and to its current values
afterwards. Collectives run again in the same order on all mesh ranks, whose schedules are the same.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from fxpart.compat import get_write_count, saved_hooks
from fxpart.errors import error
from fxpart.runtime.executor.selective_recompute import SelectiveRecomputePolicy

Mode = Literal["none", "selective", "full"]
Call = Callable[..., tuple[torch.Tensor, ...]]


class ForwardWeights(Protocol):
    """Access to the weights of the forward; see
    :class:`fxpart.runtime.weights.saved_tensor_hooks.ForwardRecomputation`.
    """

    def forward_weights(self) -> AbstractContextManager[Callable[[torch.Tensor], Any] | None]:
        """Restore the forward's weights for a recomputation; yield what packs its tensors."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a packed tensor as the running backward reads it."""


class StageRecomputation:
    """Calls the pieces of one stage, and recomputes what they did not store.

    weights: restores the weights that a forward read, if its backward reads others; None: they are
    the same. offloads: whether hooks around the stage store inputs of its pieces. unpacked: while
    it is a list, the handles that the backward has read since it was cleared; see
    :class:`fxpart.runtime.executor.split_backward.BackwardSplitter`. times: number of
    recomputations.
    """

    def __init__(
        self, module: nn.Module, mode: Mode, written: Collection[str] | None = None
    ) -> None:
        """module: the stage. written: attributes with the state that its forward passes write;
        None: all buffers.
        """
        self.mode = mode
        self.module = module
        self._written = written
        self.weights: ForwardWeights | None = None
        self.offloads = False
        self.unpacked: list[SavedTensorHandle] | None = None
        self.times = 0
        self._pieces: dict[str, _RecomputedFunction] = {}

    def call(self, piece: Call, key: int, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the piece's results; if gradients are enabled, store only its inputs."""
        if not torch.is_grad_enabled():
            return piece(key, *inputs)
        name = getattr(piece, "__name__", "forward")
        known = self._pieces.get(name)
        if known is None:
            known = self._pieces[name] = _RecomputedFunction(self, piece)
        return known.call(key, inputs)

    def list_written(self, piece: Call) -> list[torch.Tensor]:
        """Return the state that a piece may write: what its code mentions of the stage's."""
        if self._written is None:
            return list(self.module.buffers())
        mentioned = _list_names(piece)
        names = self._written if mentioned is None else [n for n in self._written if n in mentioned]
        return [getattr(self.module, name) for name in names]


class SavedTensorHandle:
    """Placeholder of a saved tensor in the autograd graph. value: the tensor, once recomputed."""

    __slots__ = ("__weakref__", "record", "value")

    def __init__(self, record: _RecomputedCall) -> None:
        """record: the call that saved it."""
        self.record = record
        self.value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """Return the tensor; the first read recomputes all tensors of the call."""
        value = self.value
        if value is None:
            self.record.again()
            value = self.value
            assert value is not None, "the recomputation fills all handles of the call"
        unpacked = self.record.piece.stage.unpacked
        if unpacked is not None:
            unpacked.append(self)
        return value


class _RecomputedFunction:
    """A function of a stage module, with what its first call revealed."""

    def __init__(self, stage: StageRecomputation, run: Call) -> None:
        self.stage = stage
        self.run = run
        self.written = stage.list_written(run)
        self.changed: tuple[int, ...] | None = None  # Inputs that it writes; None: not known yet.
        self.again = True  # Whether it is recomputed.
        # A compiled function cannot be left by an exception: torch would compile its handlers.
        self.stops = not hasattr(getattr(run, "forward", run), "__wrapped__")
        self.products = SelectiveRecomputePolicy() if stage.mode == "selective" else None

    def call(self, key: int, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Run the forward and store only a record of it."""
        if not self.again:
            return self.run(key, *inputs)
        first = self.changed is None
        record = _RecomputedCall(self, key, inputs)
        hooks = torch.autograd.graph.saved_tensors_hooks(record.pack, SavedTensorHandle.get)
        with hooks, record.products or nullcontext():
            found = self.run(key, *inputs)
        if first:
            self._analyze_first_call(record, inputs, found)
        return found

    def _analyze_first_call(
        self,
        record: _RecomputedCall,
        inputs: tuple[Any, ...],
        outputs: tuple[torch.Tensor, ...],
    ) -> None:
        """Find out what the first call saved, and which inputs it changed: all are copied."""
        module = self.stage.module
        kept = [*module.parameters(), *module.buffers(), *inputs, *outputs]
        freed = _get_storage_ids(record.saved) - _get_storage_ids(kept)
        mentioned = _list_names(self.run)
        self.again = bool(freed) or mentioned is None or "collectives" in mentioned
        freed_bytes = _count_bytes(record.saved, freed)
        record.saved.clear()
        self.changed = record.settle(inputs)
        if self.products is not None and record.products is not None:
            self.products.decide(record.products, freed_bytes)


class _RecomputedCall:
    """One call of a piece: its inputs, and a handle for each tensor that autograd saved."""

    def __init__(self, piece: _RecomputedFunction, key: int, inputs: tuple[Any, ...]) -> None:
        """Copy what the call may write."""
        self.piece = piece
        self._first = piece.changed is None
        copied = range(len(inputs)) if piece.changed is None else piece.changed
        self._state = [tensor.detach().clone() for tensor in piece.written]
        self.saved: list[torch.Tensor] = []  # Of a first call, until it ends.
        # Hooks around the stage, which store the inputs of its pieces on the host.
        hooks = saved_hooks() if piece.stage.offloads and not self._first else None
        store = None if hooks is None else hooks[0]
        self._bring = _return_same if hooks is None else hooks[1]
        self._key = key
        self._inputs: list[Any] = []
        self._versions: list[int] = []
        for place, value in enumerate(inputs):
            kept, version = value, -1
            if isinstance(value, torch.Tensor):
                kept, version = value.detach(), get_write_count(value)
                if place in copied:
                    kept = kept.clone()
                elif store is not None:
                    kept, version = _StoredInput(store(kept), value.requires_grad), -1
                if isinstance(kept, torch.Tensor):
                    kept.requires_grad_(value.requires_grad)
            self._inputs.append(kept)
            self._versions.append(version)
        self._copied = tuple(copied)
        self._slots: list[weakref.ref[SavedTensorHandle]] = []
        products = piece.products
        self.products = None if products is None else products.keeping()

    def settle(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        """Keep the copies of only those inputs that the first call has written; return their
        positions.
        """
        written = []
        for place, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                if get_write_count(value) == self._versions[place]:
                    self._inputs[place] = value.detach().requires_grad_(value.requires_grad)
                else:
                    written.append(place)
        self._copied = tuple(written)
        return self._copied

    def pack(self, tensor: torch.Tensor) -> SavedTensorHandle:
        """Return the handle that the graph stores instead of a tensor."""
        slot = SavedTensorHandle(self)
        self._slots.append(weakref.ref(slot))
        if self._first:
            self.saved.append(tensor)
        return slot

    def again(self) -> None:
        """Run the piece again and fill the handles that are still alive."""
        slots, made = self._slots, 0
        weights = self.piece.stage.weights
        packed: list[tuple[SavedTensorHandle, Any]] = []

        def fill(tensor: torch.Tensor) -> None:
            nonlocal made
            slot = slots[made]() if made < len(slots) else None
            if slot is not None and pack is not None:
                packed.append((slot, pack(tensor)))
            elif slot is not None:
                slot.value = tensor.detach()
            made += 1
            if made == len(slots) and self.piece.stops:
                raise _StopRecomputationError

        self.piece.stage.times += 1
        hooks = torch.autograd.graph.saved_tensors_hooks(fill, _forbid_unpack)
        kept = nullcontext() if self.products is None else self.products.again()
        reading: AbstractContextManager[Any] = nullcontext()
        if weights is not None:
            reading = weights.forward_weights()
        with reading as pack, torch.enable_grad(), self._restore_state(), kept, hooks:
            try:
                self.piece.run(self._key, *self._arguments())
            except _StopRecomputationError:
                pass
        for slot, value in packed:  # The parameters have the backward's weights again.
            assert weights is not None, "only forward weights pack tensors"
            slot.value = weights.unpack(value)
        if made != len(slots):
            raise error(
                "FXP900",
                where=f"recomputing {type(self.piece.stage.module).__name__}",
                why=f"it saved {made} tensors, but {len(slots)} in the first run",
                fix='use recompute="none" for this stage',
            )

    def _arguments(self) -> Iterator[Any]:
        for place, (value, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if place in self._copied and isinstance(value, torch.Tensor):
                yield value.clone()  # The piece writes it.
            elif isinstance(value, _StoredInput):
                yield self._bring(value.packed).requires_grad_(value.requires_grad)
            elif version >= 0 and get_write_count(value) != version:
                raise error(
                    "FXP109",
                    where=f"recomputing {type(self.piece.stage.module).__name__}",
                    why=f"input {place} was changed in place after it was used",
                    fix='use recompute="none" for this stage, or do not change it in place',
                )
            else:
                yield value

    @contextmanager
    def _restore_state(self) -> Iterator[None]:
        """Restore the state of this call; restore the current values afterwards."""
        written = self.piece.written
        now = [tensor.detach().clone() for tensor in written]
        # Writing .data keeps the version, so a graph that has saved the tensor accepts it.
        for tensor, old in zip(written, self._state, strict=True):
            tensor.data.copy_(old)
        try:
            yield
        finally:
            for tensor, value in zip(written, now, strict=True):
                tensor.data.copy_(value)


def _list_names(piece: Call) -> tuple[str, ...] | None:
    """Return the names in the code of a piece; None: unknown."""
    code = getattr(inspect.unwrap(getattr(piece, "forward", piece)), "__code__", None)
    return None if code is None else code.co_names


def _get_storage_ids(values: Iterable[Any]) -> set[int]:
    """Return the ids of the tensors' storages while they live; of a sparse tensor its own."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            strided = value.layout == torch.strided
            found.add(id(value.untyped_storage()) if strided else id(value))
    return found


def _count_bytes(values: Iterable[torch.Tensor], storages: set[int]) -> int:
    """Return the bytes of these storages of the values, each once."""
    found: dict[int, int] = {}
    for value in values:
        (one,) = _get_storage_ids([value])
        if one in storages:
            strided = value.layout == torch.strided
            found[one] = value.untyped_storage().nbytes() if strided else value.nbytes
    return sum(found.values())


class _StopRecomputationError(Exception):
    """Raised when all saved tensors are recomputed, so the remaining ops need not run."""


class _StoredInput(NamedTuple):
    """An input of a piece that other hooks have packed."""

    packed: Any
    requires_grad: bool


def _return_same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forbid_unpack(packed: object) -> NoReturn:
    raise AssertionError("a recomputed forward has no backward of its own")
