"""Activations that are made again: the same bits, buffers written once, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_stages import ADAMW, Whole, batch, branches, language
from live_bytes import live
from runtime_programs import bits, make
from split_models import MODELS, Attention, Scale, gradients, inputs, leaf, made
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess
from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.executor.split_backward import BackwardSplitter

MODES = ("selective", "full")
OFFLOADED: list[dict[str, Any]] = [
    {"offload": "both"}, {"offload": "activations", "recompute": "full"}
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_bits_of_one_that_keeps_all(name: str, mode: Any, split: bool) -> None:
    """Two microbatches in flight, their gradients added up; each piece runs again once."""
    plain, thrifty = made(name), made(name)
    again = StageRecomputation(thrifty, mode)
    halves = BackwardSplitter(thrifty, (), again)
    for step in range(2):
        given = [(inputs(name, 2 * step + i), inputs(name, 2 * step + i)) for i in range(2)]
        outs = [(plain(x), again.call(as_stage(thrifty), 0, y)[0]) for x, y in given]
        assert all(torch.equal(a, b) for a, b in outs)
        rests = []
        for (a, b), (x, y) in zip(outs, given, strict=True):
            torch.autograd.backward([a], [torch.cos(a.detach())])
            if split:
                rests.append(halves.first([b], [torch.cos(b.detach())], [y]))
            else:
                torch.autograd.backward([b], [torch.cos(b.detach())])
            assert gradients(thrifty, [y])[0] == gradients(plain, [x])[0]
        for rest in rests:
            assert rest is not None
            rest.run()
        assert gradients(thrifty, []) == gradients(plain, [])
        assert again.times == 2 * (step + 1)
    assert bits(dict(plain.named_buffers())) == bits(dict(thrifty.named_buffers()))


def as_stage(module: nn.Module) -> Any:
    """The module as a piece of a stage: a key first, and a tuple of results."""
    return lambda key, *given: (module(*given),)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [*({"recompute": mode} for mode in (*MODES, {0: "full", 2: "selective"})), *OFFLOADED],
    ids=["sel", "full", "mix", "offload", "both"],
)
def test_trained_bits_are_those_of_one_process(schedule: str, options: dict[str, Any]) -> None:
    """Dropout, batch statistics, a skip, a tie, smaller batches, several microbatch counts."""
    shapes = ((8, 5), (2, 7), (8, 5))
    whole = Whole(language(), ADAMW, 0.1)
    ranks = (0, 1, 1, 0) if schedule == "zb-v" else (0, 1, 0, 1)
    parts = make(language(), InProcess(2), schedule=schedule, ranks=ranks, clip_norm=0.1, **options)
    for seed, shape in enumerate(shapes):
        assert float(parts.step(batch(*shape, seed))) == float(whole.step(batch(*shape, seed), 4))
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


@pytest.mark.parametrize("options", [*({"recompute": mode} for mode in MODES), *OFFLOADED])
def test_branches(options: dict[str, Any]) -> None:
    whole = Whole(branches(), ADAMW, 0.1)
    parts = make(branches(), InProcess(4), clip_norm=0.1, **options)
    for seed in range(2):
        assert float(parts.step(batch(seed=seed))) == float(whole.step(batch(seed=seed), 4))
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


def test_user_functions_run_again_forward_only() -> None:
    module, x = made("own"), inputs("own", 0)
    again, before = StageRecomputation(module, "full"), Scale.calls
    (out,) = again.call(as_stage(module), 0, x)
    out.sum().backward()
    assert Scale.calls == before + 1


class Kept(nn.Module):
    """Writes its input in place, and reads a buffer that it then writes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(leaf(6, 6, seed=1))
        self.register_buffer("turn", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x.add_(1.0) @ self.w) * self.turn.clone()
        self.turn.mul_(1.5)
        return y


def test_inputs_and_buffers_that_are_written() -> None:
    """They are as they were while the piece runs again, and afterwards as if it had not."""
    plain, thrifty = Kept(), Kept()
    again = StageRecomputation(thrifty, "full")
    for step in range(2):
        pairs = [(leaf(4, 6, seed=i), leaf(4, 6, seed=i)) for i in range(3)]
        outs = [(plain(x * 1.0), again.call(as_stage(thrifty), 0, y * 1.0)[0]) for x, y in pairs]
        for (a, b), (x, y) in zip(outs, pairs, strict=True):
            a.sum().backward()
            b.sum().backward()
            assert torch.equal(x.grad, y.grad), step  # type: ignore[arg-type]
        assert gradients(plain, []) == gradients(thrifty, [])
        assert torch.equal(plain.turn, thrifty.turn)


def test_an_input_that_is_changed_later_is_refused() -> None:
    module = made("twice")
    again = StageRecomputation(module, "full")
    for _ in range(2):
        x = leaf(4, 6) * 1.0
        (out,) = again.call(as_stage(module), 0, x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(FxpartError, match="changed in place"):
        out.sum().backward()


@pytest.mark.slow
def test_memory_between_forward_and_backward() -> None:
    """Full keeps the input alone; selective more than that, and less than everything.

    Of some passes the least: what Python itself allocates now and then is not kept for one.
    """
    torch.manual_seed(0)
    module = nn.Sequential(Attention(32), Attention(32))
    held: dict[str, int] = {}
    for mode in ("none", "selective", "full"):
        again = StageRecomputation(module, mode)  # type: ignore[arg-type]
        for number in range(5):
            x = leaf(2, 256, 32)
            start = live()
            out = again.call(as_stage(module), 0, x)[0] if mode != "none" else module(x)
            kept = live() - start
            if number > 1:  # the first ones find out what is kept
                held[mode] = min(kept, held.get(mode, kept))
            out.sum().backward()
            del out
    size = x.nbytes
    assert held["full"] < 1.6 * size  # the result, and what stands for what was not kept
    assert held["full"] < held["selective"] < 0.8 * held["none"]


class Watch(TorchDispatchMode):
    """Lists the names of ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_selective_keeps_long_products_only() -> None:
    """Products of linear layers are not made again; attention scores are."""
    torch.manual_seed(0)
    module = Attention(64)
    again = StageRecomputation(module, "selective")
    for _ in range(2):
        (out,) = again.call(as_stage(module), 0, leaf(2, 256, 64))
        with Watch() as watch:
            out.backward(torch.ones_like(out))
    assert "aten::addmm" not in watch.seen and "aten::_softmax" in watch.seen


def test_the_first_call_keeps_no_short_products() -> None:
    """Otherwise the first step needs more memory than the others."""
    module = nn.Sequential(nn.Linear(64, 1), nn.Linear(1, 512), nn.GELU(), nn.Linear(512, 64))
    again = StageRecomputation(module, "selective")
    made_again = []
    for _ in range(2):
        (out,) = again.call(as_stage(module), 0, leaf(32, 64))
        with Watch() as watch:
            out.backward(torch.ones_like(out))
        made_again.append(watch.seen.count("aten::addmm"))
    assert made_again == [1, 1]


def test_products_that_are_written_in_parts_run_again() -> None:
    """A GRU cell writes parts of a product in place, which do not count as writes of the whole."""
    torch.manual_seed(0)
    cell = nn.GRUCell(16, 16)
    again = StageRecomputation(cell, "selective")
    for seed in range(3):
        x, h = leaf(4, 16, seed=seed), leaf(4, 16, seed=seed + 3)
        x_again, h_again = leaf(4, 16, seed=seed), leaf(4, 16, seed=seed + 3)
        cell(x, cell(x, h)).square().sum().backward()
        whole = gradients(cell, [x, h])
        cell.zero_grad()
        (out,) = again.call(
            lambda key, *given: (cell(given[0], cell(*given)),), 0, x_again, h_again
        )
        out.square().sum().backward()
        assert gradients(cell, [x_again, h_again]) == whole
        cell.zero_grad()


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(FxpartError, match="no such mode"):
        make(language(), InProcess(4), recompute="some")


def test_what_keeps_nothing_of_its_own_is_not_run_again() -> None:
    """A linear layer and its activation: the input and the result are there anyway."""
    torch.manual_seed(0)
    short = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    for module, wanted in ((short, 1), (made("twice"), 3)):  # the first call is always recorded
        again = StageRecomputation(module, "full")
        for step in range(3):
            x, y = leaf(4, 6, seed=step), leaf(4, 6, seed=step)
            (out,) = again.call(as_stage(module), 0, x)
            assert torch.equal(out, module(y))
            out.sum().backward()
            module(y).sum().backward()
            assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
        assert again.times == wanted
