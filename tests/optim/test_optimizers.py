"""Optimizers of whole matrices: torch's own steps, an oracle in NumPy, invariance and memory."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fxpart.compat.optimizer_choice import choose, state_bytes, tensors_in
from fxpart.errors import FxpartError
from fxpart.optim import BasisRotation, Muon, RowWiseAdagrad

SHAPES = ((6, 4), (3, 5), (4,), (2, 2, 3), (1, 1))
Array = NDArray[np.float64]
EPS = 1e-3  # the first rotated gradient is diagonal: elsewhere rounding errors are divided by it


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for s in SHAPES]


def give_gradients(given: list[nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in given:
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_and_adamw(dtype: torch.dtype, nesterov: bool) -> None:
    """Bit for bit, the other parameters with their share of the learning rate."""
    mine, torchs = parameters(dtype), parameters(dtype)
    own = Muon(mine, lr=0.02, nesterov=nesterov, weight_decay=0.1, other_lr=0.25)
    others = {"lr": 0.02 * 0.25, "weight_decay": 0.1, "foreach": False}
    real = [
        torch.optim.Muon([p for p in torchs if p.ndim == 2], lr=0.02, nesterov=nesterov),
        torch.optim.AdamW([p for p in torchs if p.ndim != 2], **others),
    ]
    for seed in range(5):
        give_gradients(mine, seed)
        give_gradients(torchs, seed)
        for optimizer in (own, *real):
            optimizer.step()
    for p, q in zip(mine, torchs, strict=True):
        assert torch.equal(p, q) or (p.ndim != 2 and torch.allclose(p, q, rtol=1e-6, atol=1e-6))


class Rotated:
    """The published steps for one matrix, in NumPy."""

    def __init__(self, weight: Array, refresh: int, geometry: str, source: str) -> None:
        self.weight, self.refresh, self.source = weight.copy(), refresh, source
        rows, columns = weight.shape
        self.sides = [geometry == "bi" or rows <= columns, geometry == "bi" or rows > columns]
        self.moments = [np.zeros((size, size)) for size in weight.shape]
        self.bases = [np.eye(size) for size in weight.shape]
        self.first, self.second, self.count = np.zeros_like(weight), np.zeros_like(weight), 0

    def step(self, g: Array, lr: float, beta1: float, beta2: float, decay: float) -> None:
        self.count += 1
        if self.source == "1st":
            self._turn_by_the_mean(beta1 * self.first + (1 - beta1) * g)
        for side, outer in enumerate((g @ g.T, g.T @ g)):
            self.moments[side] = beta2 * self.moments[side] + (1 - beta2) * outer
            if self.source == "1st":
                continue
            if self.sides[side] and self.count == 1:
                values, vectors = np.linalg.eigh(self.moments[side])
                self.bases[side] = vectors[:, np.argsort(-values)]
            elif self.sides[side] and self.count % self.refresh == 0:
                basis, moment = self.bases[side], self.moments[side]
                order = np.argsort(-np.diag(basis.T @ moment @ basis))
                self.second = np.take(self.second, order, axis=side)
                self.bases[side] = np.linalg.qr(moment @ basis[:, order])[0]
        left, right = self.bases
        self.first = beta1 * self.first + (1 - beta1) * g
        self.second = beta2 * self.second + (1 - beta2) * (left.T @ g @ right) ** 2
        scaled = left.T @ self.first @ right / (np.sqrt(self.second) + EPS)
        rate = lr * np.sqrt(1 - beta2**self.count) / (1 - beta1**self.count)
        self.weight = (1 - lr * decay) * self.weight - rate * left @ scaled @ right.T

    def _turn_by_the_mean(self, mean: Array) -> None:
        """The basis from the first moment: singular vectors, later power steps."""
        if self.count == 1:
            left, _, right = np.linalg.svd(mean)
            self.bases = [b if s else o for b, o, s in
                          zip((left, right.T), self.bases, self.sides, strict=True)]  # fmt: skip
        elif self.count % self.refresh == 0:
            if all(self.sides):
                self.bases[0] = np.linalg.qr(mean @ self.bases[1], mode="complete")[0]
                self.bases[1] = np.linalg.qr(mean.T @ self.bases[0], mode="complete")[0]
                return
            side = self.sides.index(True)
            own = mean @ mean.T if side == 0 else mean.T @ mean
            self.bases[side] = np.linalg.qr(own @ self.bases[side])[0]


@pytest.mark.parametrize("refresh", [1, 3, 10])
@pytest.mark.parametrize(
    ("shape", "geometry", "source"),
    [
        ((4, 4), "bi", "2nd"), ((4, 4), "uni", "2nd"), ((5, 3), "uni", "2nd"),
        ((3, 5), "uni", "2nd"), ((4, 4), "bi", "1st"), ((4, 4), "uni", "1st"),
        ((5, 3), "uni", "1st"), ((3, 5), "uni", "1st"),
    ],
)  # fmt: skip
def test_basis_rotation_is_its_formula(
    shape: Any, refresh: int, geometry: str, source: str
) -> None:
    """In double precision; both sides of a square, as a rectangle's vectors are not unique."""
    draw = np.random.default_rng(0)
    start = draw.normal(size=shape)
    weight = nn.Parameter(torch.tensor(start))
    optimizer = BasisRotation(
        [weight], lr=0.01, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1, refresh=refresh,
        geometry=geometry, source=source,
    )  # fmt: skip
    oracle = Rotated(start, refresh, geometry, source)
    for _ in range(25):
        gradient = draw.normal(size=shape)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        oracle.step(gradient, 0.01, 0.9, 0.95, 0.1)
        assert np.abs(weight.detach().numpy() - oracle.weight).max() < 1e-12


@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_the_first_step_by_hand(source: str) -> None:
    """G = U s V^T: after step 1 every rotated quotient is 1, so that W moves by -lr U V^T.

    G = [[0, -2], [1, 0]] has U V^T = [[0, -1], [1, 0]]; with the squares of step 2, of G again, the
    quotients stay 1.
    """
    weight = nn.Parameter(torch.zeros(2, 2).double())
    options = {"lr": 0.1, "eps": 1e-30, "weight_decay": 0.0, "refresh": 1}
    optimizer = BasisRotation([weight], source=source, **options)
    for count in (1, 2):
        weight.grad = torch.tensor([[0.0, -2.0], [1.0, 0.0]]).double()
        optimizer.step()
        expected = count * 0.1 * torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double()
        assert (weight.detach() - expected).abs().max() < 1e-12


def test_late_stages_refresh_more_often_by_hand() -> None:
    """Staleness 3, 2, 1, 0: four, three, two and one tenth of all refreshes, after the first."""
    expected = {
        0: [7, 13, 19, 25, 32, 38, 44, 50], 1: [9, 17, 25, 34, 42, 50], 2: [13, 25, 38, 50],
        3: [25, 50],
    }  # fmt: skip
    for stage, steps in expected.items():
        for aware, own in ((True, steps), (False, [10, 20, 30, 40, 50])):
            weight = nn.Parameter(torch.zeros(3, 3).double())
            optimizer = BasisRotation([weight], refresh=10, stage_aware=aware)
            optimizer.set_delays(stage, (3, 2, 1, 0))
            found, before = [], torch.zeros(3, 3).double()
            for step in range(1, 51):
                give_gradients([weight], step)
                optimizer.step()
                basis = optimizer.state[weight]["left_basis"]
                found += [step] if not torch.equal(basis, before) else []
                before = basis.clone()
                if step == 20:  # a copy continues alike
                    optimizer = copy.deepcopy(optimizer)
                    (weight,) = optimizer.param_groups[0]["params"]
            assert found == [1, *own]


def test_the_first_step_can_be_skipped() -> None:
    """Then a rounding error in the first gradient stays one."""
    for skip, apart in ((True, 1e-10), (False, 1e-3)):
        ends = []
        for noise in (0.0, 1e-14):
            weights = [nn.Parameter(torch.ones(4, 4).double())]
            optimizer = BasisRotation(weights, lr=0.01, eps=1e-20, skip_first=skip)
            before = weights[0].detach().clone()
            for seed in range(2):
                give_gradients(weights, seed)
                if not seed:
                    weights[0].grad = weights[0].grad + noise * torch.ones(4, 4).double().tril()
                optimizer.step()
                assert torch.equal(weights[0], before) == (skip and not seed)
            ends.append(weights[0].detach().clone())
        assert (float((ends[0] - ends[1]).abs().max()) > apart) != skip


def test_one_by_one_and_no_rotation_is_adamw() -> None:
    """Where nothing can be rotated: the epsilon alone is at another place."""
    for options in ({}, {"longest": 0}):
        mine, torchs = parameters(), parameters()
        if not options:
            mine, torchs = mine[2:], torchs[2:]
        own = BasisRotation(mine, lr=0.01, betas=(0.9, 0.99), **options)
        real = torch.optim.AdamW(torchs, lr=0.01, betas=(0.9, 0.99))
        for seed in range(8):
            give_gradients(mine, seed)
            give_gradients(torchs, seed)
            own.step()
            real.step()
        assert all(
            torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in zip(mine, torchs, strict=True)
        )


@pytest.mark.parametrize("refresh", [1, 10])
def test_a_rotated_problem_has_rotated_weights(refresh: int) -> None:
    """W -> Q W P with orthogonal Q, P: the same path, where AdamW takes another."""
    draw = torch.Generator().manual_seed(0)
    target, x, q, p = (torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(4))
    q, p = torch.linalg.qr(q)[0], torch.linalg.qr(p)[0]
    rotation = partial(BasisRotation, lr=0.05, eps=1e-6, refresh=refresh, weight_decay=0.0)
    adamw = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0)
    apart = []
    for make in (rotation, adamw):
        ends = []
        for left, right in ((torch.eye(4).double(), torch.eye(4).double()), (q, p)):
            weight = nn.Parameter(left @ torch.ones(4, 4).double().tril() @ right)
            optimizer = make([weight])
            for _ in range(30):
                optimizer.zero_grad()
                plain = left.T @ weight @ right.T
                ((plain - target) @ x).square().sum().backward()
                optimizer.step()
            ends.append(left.T @ weight.detach() @ right.T)
        apart.append(float((ends[0] - ends[1]).abs().max()))
    assert apart[0] < 2e-6 < 0.1 < apart[1]


def test_memory_is_what_the_planner_takes() -> None:
    """2 (r^2 + c^2) elements beside those of Adam, of the sides that are rotated."""
    rows, columns = 6, 4
    for options, squares in (
        ({}, 2 * (rows**2 + columns**2)),
        ({"geometry": "uni"}, 2 * columns**2),
        ({"longest": 5}, 2 * columns**2),
        ({"source": "1st"}, rows**2 + columns**2),
    ):
        weight = nn.Parameter(torch.zeros(rows, columns))
        optimizer = BasisRotation([weight], **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        real = sum(t.numel() * t.element_size() for t in tensors_in(optimizer.state[weight]))
        assert real == 4 * (squares + 2 * rows * columns + 1)
        made: Any = partial(BasisRotation, **options)
        assert state_bytes(choose(made), [((rows, columns), torch.float32)]) == [real]
    (large,) = state_bytes(choose(BasisRotation), [((4096, 1024), torch.float32)])
    assert large == 4 * (2 * (4096**2 + 1024**2) + 2 * 4096 * 1024 + 1)
    (muon,) = state_bytes(choose(Muon), [((4096, 1024), torch.float32)])
    assert muon == 4 * (4096 * 1024 + 1)


@pytest.mark.parametrize("kind", [Muon, BasisRotation])
def test_what_cannot_be_stepped(kind: Any) -> None:
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"other_lr": -1}, {"betas": (0.9, 1.0)}):
        with pytest.raises(FxpartError, match="out of range"):
            kind(parameters(), **options)
    if kind is BasisRotation:
        for options in ({"source": "3rd"}, {"geometry": "tri"}, {"refresh": 0}):
            with pytest.raises(FxpartError, match="out of range"):
                kind(parameters(), **options)
    weight = nn.Parameter(torch.zeros(3, 2))
    optimizer = kind([weight])
    weight.grad = torch.ones(3, 2).to_sparse(1)
    with pytest.raises(FxpartError, match="sparse"):
        optimizer.step()
    other = kind(parameters())
    give_gradients([*other.param_groups[0]["params"]], 1)
    assert other.step(lambda: 3) == 3
    again = kind(parameters())
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    pairs = list(zip(*(o.param_groups[0]["params"] for o in (other, again)), strict=True))
    for p, q in pairs:
        q.data = p.data.clone()
    for one, given in zip((other, again), zip(*pairs, strict=True), strict=True):
        give_gradients([*given], 2)
        one.step()
    assert all(torch.equal(p, q) for p, q in pairs)


def test_row_wise_adagrad_by_hand() -> None:
    """g = (3, 4): s = 25 / 2, and w moves by -lr g / sqrt(s); then s = 25 and 25 / 2 of a row."""
    weight = nn.Parameter(torch.zeros(2, 2).double())
    optimizer = RowWiseAdagrad([weight], lr=0.1, eps=1e-30)
    gradient = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()
    for expected in (12.5**-0.5, 12.5**-0.5 + 25.0**-0.5):
        weight.grad = gradient
        optimizer.step()
        assert (weight.detach() + 0.1 * expected * gradient).abs().max() < 1e-15
    assert optimizer.state[weight]["sum"].tolist() == [[25.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 16), (9, 3), (9, 1), (9, 2, 5), (9,)])
def test_row_wise_adagrad_of_sparse_and_dense_gradients(shape: Any, dtype: torch.dtype) -> None:
    """Equal bits, rows that come twice included; in double precision the formula to 1e-12."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=draw, dtype=torch.float64)
    dense, sparse = (nn.Parameter(start.to(dtype, copy=True)) for _ in range(2))
    options: Any = {"lr": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.5}
    optimizers = [RowWiseAdagrad([p], **options) for p in (dense, sparse)]
    weight, sums = start.numpy().reshape(9, -1).copy(), np.full((9, 1), 0.5)
    for step in range(6):
        ids = torch.randint(0, 9, (step * 2,), generator=draw)
        values = torch.randn(len(ids), *shape[1:], generator=draw, dtype=torch.float64).to(dtype)
        sparse.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, shape)
        dense.grad = sparse.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
        g = dense.grad.double().numpy().reshape(9, -1)
        sums += (g**2).mean(1, keepdims=True)
        weight -= 0.1 * g / (np.sqrt(sums) + 1e-3)
        assert torch.equal(dense, sparse)
        found = (optimizers[k].state[p]["sum"] for k, p in enumerate((dense, sparse)))
        assert torch.equal(*found)
    apart = np.abs(dense.detach().double().numpy().reshape(9, -1) - weight).max()
    assert apart < {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.2)
    (size,) = state_bytes(choose("rowwiseadagrad"), [(shape, dtype)])
    assert size == 9 * (8 if dtype == torch.float64 else 4)


def test_row_wise_adagrad_refuses_what_it_does_not_step() -> None:
    for options in ({"lr": -1.0}, {"eps": 0.0}, {"initial_accumulator_value": -1.0}):
        with pytest.raises(FxpartError, match="out of range"):
            RowWiseAdagrad(parameters(), **options)
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(FxpartError, match="complex"):
        RowWiseAdagrad([weight]).step()
