"""Regions and slots: what is free, what grows, what is given back, and from which thread."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpart.runtime.transport import shared_memory_arena
from fxpart.runtime.transport.shared_memory_arena import (
    Arena,
    ArenaSlot,
    MappedRegion,
    compute_slot_size,
    view_as_tensor,
)


class Pair:
    """An arena and what its receiver has mapped, in one process."""

    def __init__(self) -> None:
        self.mapped: dict[int, MappedRegion] = {}
        self.gone: list[int] = []
        self.arena = Arena(self.announce)

    def announce(self, region: int, descriptor: int, size: int, whole: int) -> None:
        if descriptor < 0:
            self.gone.append(region)
            del self.mapped[region]
        else:
            self.mapped[region] = MappedRegion(descriptor, size, whole)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        slot = self.arena.take(size)
        slot.fill(tensor)
        message = self.mapped[slot.region].message(slot.index, size)
        return view_as_tensor(message, tensor.dtype, tuple(tensor.shape))


@given(st.integers(1, 1 << 32))
def test_a_slot_is_large_enough_and_little_larger(size: int) -> None:
    found = compute_slot_size(size)
    assert size <= found <= max(size + 4095, size * 9 // 8 + 64)
    assert found % 64 == 0 and compute_slot_size(found) == found


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=40))
def test_no_message_changes_while_it_is_held(steps: list[tuple[int, bool]]) -> None:
    pair, held = Pair(), list[tuple[int, torch.Tensor]]()
    for number, (size, drop) in enumerate(steps):
        held.append((number, pair.move(torch.full((size,), number))))
        if drop:
            held.pop(number % len(held))
        assert all(bool((tensor == mark).all()) for mark, tensor in held)


def test_a_slot_is_used_again_when_the_last_reference_is_gone() -> None:
    pair = Pair()
    first = pair.move(torch.arange(3.0))
    address, view = first.data_ptr(), first[1:]
    del first
    assert pair.move(torch.zeros(3)).data_ptr() != address
    assert view.tolist() == [1.0, 2.0]
    del view
    assert pair.move(torch.zeros(3)).data_ptr() == address


@pytest.mark.slow
def test_what_autograd_saved_keeps_its_slot() -> None:
    pair = Pair()
    received = pair.move(torch.full((4,), 3.0)).requires_grad_()
    address, loss = received.data_ptr(), (received * received).sum()
    leaf = torch.autograd.graph.get_gradient_edge(received)
    del received
    assert pair.move(torch.zeros(4)).data_ptr() != address
    loss.backward()
    del loss, leaf
    gc.collect()
    assert pair.move(torch.zeros(4)).data_ptr() == address


def test_a_slot_is_freed_by_any_thread() -> None:
    pair = Pair()
    held = [pair.move(torch.ones(5))]
    address = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pair.move(torch.zeros(5)).data_ptr() == address


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64,
     torch.float8_e4m3fn, torch.uint8],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 7)])
def test_every_kind_of_tensor_is_itself_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given_ = (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
    found = Pair().move(given_)
    assert found.dtype == dtype and found.shape == given_.shape and found.is_contiguous()
    assert torch.equal(
        found.view(torch.uint8) if shape else found, given_.view(torch.uint8) if shape else given_
    )
    assert not found.requires_grad and found._base is None


def test_memory_that_was_not_used_for_long_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to IDLE bytes, and never what is held."""
    monkeypatch.setattr(shared_memory_arena, "IDLE", 5 << 20)
    pair = Pair()
    kept = pair.move(torch.ones(1 << 20))
    for _ in range(2):
        many = [pair.move(torch.zeros(1 << 19)) for _ in range(8)]
        del many
    full, regions = pair.arena.size, len(pair.mapped)
    assert 20 << 20 <= full <= 24 << 20 and regions == 7  # the second time takes no more
    for _ in range(shared_memory_arena.AGE):
        pair.arena.tidy()
    assert pair.arena.size == full
    for _ in range(3):
        pair.arena.tidy()
    assert pair.arena.size <= 10 << 20
    assert sorted([*pair.gone, *pair.mapped]) == list(range(regions))
    assert bool((kept == 1).all())


def test_memory_that_every_step_uses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nothing is in it whenever a step ends."""
    monkeypatch.setattr(shared_memory_arena, "IDLE", 5 << 20)
    pair = Pair()
    for _ in range(3 * shared_memory_arena.AGE):
        many = [pair.move(torch.zeros(1 << 18)) for _ in range(12)]
        del many
        pair.arena.tidy()
    assert pair.arena.size > 12 << 20
    assert not pair.gone


def test_many_large_slots_take_few_descriptors() -> None:
    pair = Pair()
    before = len(os.listdir("/proc/self/fd"))
    held = [pair.move(torch.zeros(1 << 19)[:300000]) for _ in range(64)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 12
    assert len({tensor.data_ptr() for tensor in held}) == 64


def test_a_slot_that_does_not_exist_is_refused() -> None:
    pair = Pair()
    pair.move(torch.zeros(1 << 19))
    with pytest.raises(ConnectionError):
        pair.mapped[0].message(7, 64)


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    """Maps and their descriptors go with the last tensor."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair()
    kept = pair.move(torch.ones(1 << 19))
    assert _maps() == 2
    del pair
    gc.collect()
    assert _maps() == 1 and bool((kept == 1).all())
    del kept
    assert _maps() == 0 and len(os.listdir("/proc/self/fd")) == before


def _maps() -> int:
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sum("memfd:fxpart" in line for line in lines)


def test_a_slot_is_filled_from_any_layout() -> None:
    pair = Pair()
    given_ = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    slot: ArenaSlot = pair.arena.take(24)
    slot.fill(given_)
    found = view_as_tensor(pair.mapped[0].message(slot.index, 24), torch.float32, (3, 2))
    assert torch.equal(found, given_)
