"""Activations that a forward does not keep: they are made again just before they are needed.

"full": a piece of a stage (a block of the model, or the whole stage where its code has no blocks)
keeps its inputs; when the backward first asks for something that autograd would have saved, the
piece runs forward again. "selective": the results of long products are kept too (linear layers,
convolutions, fused attention), so that what runs again is cheap: attention scores, activation
functions, norms, dropout (Korthikanti et al. 2022, section 5). A piece of which autograd saves
nothing but weights, its inputs and its results, which are kept anyway, is not run again, unless it
has collectives: lanes decide each by itself, and have to do the same.

Every number stays what it was. The autograd graph is that of the plain forward, only its saved
tensors are handles; random ops are seeded by the microbatch's key; buffers that a forward writes
are as they were for that forward while it runs again, and afterwards as if it had not; collectives
run again in the same order on all lanes, whose schedules are the same.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import nn

from fxpart.compat import get_write_count
from fxpart.errors import error
from fxpart.runtime.executor.selective_recompute import SelectiveRecomputePolicy

Mode = Literal["none", "selective", "full"]
Call = Callable[..., tuple[torch.Tensor, ...]]


class ForwardWeights(Protocol):
    """See :class:`fxpart.runtime.weights.forward_recomputation.ForwardRecomputation`."""

    def forward_weights(self) -> AbstractContextManager[Callable[[torch.Tensor], Any] | None]:
        """Around a forward that runs again: what packs the tensors that it saves."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """A packed tensor as the backward that runs reads it."""


class StageRecomputation:
    """Calls the pieces of one stage, and makes what they did not keep.

    weights: gives the weights that a forward read, where its backward reads others; None: they are
    the same. unpacked: while it is a list, what the backward has asked for since it was emptied;
    see :class:`fxpart.runtime.executor.split_backward.BackwardSplitter`. times: how often a piece
    was run again.
    """

    def __init__(self, module: nn.Module, mode: Mode) -> None:
        """module: the stage, whose buffers its pieces may write."""
        self.mode = mode
        self.module = module
        self.weights: ForwardWeights | None = None
        self.unpacked: list[SavedTensorHandle] | None = None
        self.times = 0
        self._pieces: dict[str, _RecomputedFunction] = {}

    def call(self, piece: Call, key: int, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The piece's results; where gradients are wanted nothing but its inputs is kept."""
        if not torch.is_grad_enabled():
            return piece(key, *inputs)
        name = getattr(piece, "__name__", "forward")
        known = self._pieces.get(name)
        if known is None:
            known = self._pieces[name] = _RecomputedFunction(self, piece)
        return known.call(key, inputs)


class SavedTensorHandle:
    """Stands for a saved tensor in the autograd graph. value: the tensor, once it was made."""

    __slots__ = ("__weakref__", "record", "value")

    def __init__(self, record: _RecomputedCall) -> None:
        """record: the call that saved it."""
        self.record = record
        self.value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """The tensor; the first to be asked for brings all of its call."""
        value = self.value
        if value is None:
            self.record.again()
            value = self.value
            assert value is not None, "the call fills all of its slots"
        unpacked = self.record.piece.stage.unpacked
        if unpacked is not None:
            unpacked.append(self)
        return value


class _RecomputedFunction:
    """A function of a stage module, and what was learnt from its first call."""

    def __init__(self, stage: StageRecomputation, run: Call) -> None:
        self.stage = stage
        self.run = run
        self.written: list[torch.Tensor] | None = None  # buffers
        self.changed: tuple[int, ...] = ()  # inputs that it writes in place
        self.again = True  # whether it runs again
        self.products = SelectiveRecomputePolicy() if stage.mode == "selective" else None

    def call(self, key: int, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """A forward of which only a record stays."""
        if not self.again:
            return self.run(key, *inputs)
        first = self.written is None
        watched = list(self.stage.module.buffers()) if self.written is None else self.written
        before = [buffer.detach().clone() for buffer in watched]
        record = _RecomputedCall(
            self, key, inputs, before, range(len(inputs)) if first else self.changed
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(record.pack, SavedTensorHandle.get)
        with hooks, record.products or nullcontext():
            found = self.run(key, *inputs)
        if first:
            self._learn(record, watched, inputs, found)
        return found

    def _learn(
        self,
        record: _RecomputedCall,
        watched: list[torch.Tensor],
        inputs: tuple[Any, ...],
        outputs: tuple[torch.Tensor, ...],
    ) -> None:
        """The first call has copied all that could change; keep what did."""
        kept = [*self.stage.module.parameters(), *watched, *inputs, *outputs]
        self.again = bool(_storages(record.saved) - _storages(kept)) or _exchanges(self.run)
        record.saved.clear()
        pairs = list(zip(watched, record.buffers, strict=True))
        changed = [not torch.equal(buffer, old) for buffer, old in pairs]
        self.written = [buffer for (buffer, _), new in zip(pairs, changed, strict=True) if new]
        record.buffers = [old for (_, old), new in zip(pairs, changed, strict=True) if new]
        self.changed = record.settle(inputs)
        if self.products is not None and record.products is not None:
            self.products.decide(record.products, record.bytes)


class _RecomputedCall:
    """One call of a piece: what it was given, and a slot for each tensor that autograd saved."""

    def __init__(
        self,
        piece: _RecomputedFunction,
        key: int,
        inputs: tuple[Any, ...],
        buffers: list[torch.Tensor],
        copied: Any,
    ) -> None:
        """buffers: copies of those that the call may write. copied: inputs that it may write."""
        self.piece = piece
        self.buffers = buffers
        self.bytes = 0
        self.saved: list[torch.Tensor] = []  # by a first call, until it is over
        self._key = key
        self._inputs: list[Any] = []
        self._versions: list[int] = []
        for place, value in enumerate(inputs):
            kept, version = value, -1
            if isinstance(value, torch.Tensor):
                kept, version = value.detach(), get_write_count(value)
                if place in copied:
                    kept, version = kept.clone(), 0
                kept.requires_grad_(value.requires_grad)
            self._inputs.append(kept)
            self._versions.append(version)
        self._copied = tuple(copied)
        self._slots: list[weakref.ref[SavedTensorHandle]] = []
        products = piece.products
        self.products = None if products is None else products.keeping()

    def settle(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        """After a call for which all inputs were copied: those that it has written stay so."""
        written = []
        for place, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                if torch.equal(value.detach(), self._inputs[place].detach()):
                    self._inputs[place] = value.detach().requires_grad_(value.requires_grad)
                    self._versions[place] = get_write_count(value)
                else:
                    written.append(place)
        self._copied = tuple(written)
        return self._copied

    def pack(self, tensor: torch.Tensor) -> SavedTensorHandle:
        """What the graph holds in place of a tensor."""
        slot = SavedTensorHandle(self)
        self._slots.append(weakref.ref(slot))
        if self.piece.written is None:
            self.bytes += tensor.nbytes
            self.saved.append(tensor)
        return slot

    def again(self) -> None:
        """Run the piece again and fill the slots that are still there."""
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
            if made == len(slots):
                raise _StopRecomputationError

        self.piece.stage.times += 1
        hooks = torch.autograd.graph.saved_tensors_hooks(fill, _never)
        kept = nullcontext() if self.products is None else self.products.again()
        reading: AbstractContextManager[Any] = nullcontext()
        if weights is not None:
            reading = weights.forward_weights()
        with reading as pack, torch.enable_grad(), self._as_before(), kept, hooks:
            try:
                self.piece.run(self._key, *self._arguments())
            except _StopRecomputationError:
                pass
        for slot, value in packed:  # the parameters hold the backward's weights again
            assert weights is not None, "it packs"
            slot.value = weights.unpack(value)
        if made != len(slots):
            raise error(
                "FXP900",
                where=f"recomputing {type(self.piece.stage.module).__name__}",
                why=f"{made} tensors were saved, and {len(slots)} the first time",
                fix="leave recompute out for this stage",
            )

    def _arguments(self) -> Iterator[Any]:
        for place, (value, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if place in self._copied and isinstance(value, torch.Tensor):
                yield value.clone()  # the piece writes it
            elif version >= 0 and get_write_count(value) != version:
                raise error(
                    "FXP109",
                    where=f"recomputing {type(self.piece.stage.module).__name__}",
                    why=f"input {place} was changed in place after it was used",
                    fix="leave recompute out for this stage, or do not change it in place",
                )
            else:
                yield value

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Buffers as they were for this call; what they are now comes back."""
        written = self.piece.written or []
        now = [buffer.detach().clone() for buffer in written]
        # Without a new version: a graph that has saved the buffer finds it as it was.
        for buffer, old in zip(written, self.buffers, strict=True):
            buffer.data.copy_(old)
        try:
            yield
        finally:
            for buffer, value in zip(written, now, strict=True):
                buffer.data.copy_(value)


def _exchanges(piece: Call) -> bool:
    """Whether its code calls collectives."""
    code = getattr(inspect.unwrap(getattr(piece, "forward", piece)), "__code__", None)
    return code is None or "collectives" in code.co_names


def _storages(values: Iterable[Any]) -> set[int]:
    """Which memory tensors are in, as long as they live; sparse ones are in their own."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            strided = value.layout == torch.strided
            found.add(id(value.untyped_storage()) if strided else id(value))
    return found


class _StopRecomputationError(Exception):
    """Everything that was saved has been made; what follows in the piece need not run again."""


def _never(packed: object) -> NoReturn:
    raise AssertionError("nobody goes backward through a forward that is run again")
