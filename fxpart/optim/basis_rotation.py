"""Basis rotation: Adam in the eigenbasis of the gradients' second moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from fxpart.optim.matrix_optimizer import Group, MatrixOptimizer, State

Geometry = Literal["bi", "uni"]
Source = Literal["2nd", "1st"]


class BasisRotation(MatrixOptimizer):
    """Rotates each matrix, so that late gradients cost Adam less; other parameters by AdamW.

    With G the gradient of a matrix W of r x c, b the second beta and n the number of the step:

    1. L <- b L + (1 - b) G G^T, R <- b R + (1 - b) G^T G.
    2. At the first step U and V are the eigenvectors of L and R, the largest eigenvalue first. At
       every ``refresh``-th step the columns of U are ordered by diag(U^T L U), the rows of S alike,
       and U <- Q of the QR decomposition of L U; V and the columns of S in the same way by R.
    3. M <- b1 M + (1 - b1) G, which is not rotated, and S <- b2 S + (1 - b2) (U^T G V)^2.
    4. W <- (1 - lr d) W - lr sqrt(1 - b2^n) / (1 - b1^n) U [U^T M V / (sqrt(S) + eps)] V^T.

    geometry: "bi" rotates both sides, "uni" the smaller one. longest: sides with more elements
    are not rotated, as L, R, U and V take 2 (r^2 + c^2) elements beside M and S ("1st": half of
    that). They are float32 for smaller dtypes. The first rotated gradient is diagonal, up to
    rounding errors that step 4 scales up; skip_first leaves the matrices unchanged in the first
    step, as SOAP does. Source: basis rotation by the second moment, arXiv 2602.03515; "bi" is
    SOAP.

    source: "2nd" takes the basis from L and R, as above; "1st" from M after step 3: at the
    first step U and V are its singular vectors, the largest value first; later U <- Q of M V,
    and then V <- Q of M^T U, without reordering. With one side, U <- Q of M M^T U. It stores
    neither L nor R. The first step and the case of one side are fxpart's choice. Where M is
    singular, a part of U or V depends on rounding.

    stage_aware: stages with later gradients refresh more often, in proportion to 1 + the
    updates that they miss, and all stages together as often as before: fxpart's rule for the
    published idea. In pipelines with flushes it changes nothing.

    program.trainer(functools.partial(BasisRotation, lr=1e-3), weights="stash")
    """

    _share = (1, 1)  # of this stage in the refreshes, and that of a stage on average

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        refresh: int = 10,
        geometry: Geometry = "bi",
        longest: int = 8192,
        skip_first: bool = False,
        source: Source = "2nd",
        stage_aware: bool = False,
        other_lr: float = 1.0,
    ) -> None:
        if refresh < 1:
            self._reject("refresh", refresh, "use a number of steps of at least 1")
        if geometry not in ("bi", "uni"):
            self._reject("geometry", geometry, 'use "bi" or "uni"')
        if source not in ("2nd", "1st"):
            self._reject("source", source, 'use "2nd" or "1st"')
        options = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "refresh": refresh,
            "geometry": geometry, "longest": longest, "skip_first": skip_first,
            "source": source, "stage_aware": stage_aware, "other_lr": other_lr,
        }  # fmt: skip
        super().__init__(params, options)

    def set_delays(self, stage: int, delays: Sequence[int]) -> None:
        """Note the updates that each stage misses, for stage-aware refreshes of this stage."""
        late = [1 + delay for delay in delays]
        self._share = late[stage] * len(late), sum(late)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, with the share of the stage."""
        return {**super().__getstate__(), "_share": self._share}

    def _is_refreshed(self, count: int, group: Group) -> bool:
        """Return whether a step refreshes the bases: the first, and on average every refresh-th."""
        share, average = self._share if group["stage_aware"] else (1, 1)
        period = group["refresh"] * average
        return count == 1 or count * share // period > (count - 1) * share // period

    def step_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update the moments and the basis, then the matrix."""
        if "exp_avg" not in state:
            _start(state, gradient, group)
        g = gradient.to(state["exp_avg"].dtype)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        left, right = state.get("left"), state.get("right")
        if left is not None:
            left.lerp_(g @ g.T, 1 - beta2)
        if right is not None:
            right.lerp_(g.T @ g, 1 - beta2)
        first.lerp_(g, 1 - beta1)
        if weight.is_meta or not weight.numel():
            return  # there is nothing to compute
        count = int(state["step"])
        if self._is_refreshed(count, group):
            for dim, (moment, basis) in enumerate(((left, "left_basis"), (right, "right_basis"))):
                if moment is not None:
                    refresh_basis(moment, state[basis], second, dim, first=count == 1)
            if group["source"] == "1st":
                refresh_bases_by_mean(first, state, first=count == 1)
        rotated = _rotate(g, state)
        second.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        if count == 1 and group["skip_first"]:
            return
        direction = _rotate(first, state).div_(second.sqrt().add_(group["eps"]))
        direction = _rotate(direction, state, back=True)
        weight.mul_(1 - lr * group["weight_decay"])
        rate = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        weight.add_(direction.to(weight.dtype), alpha=-rate)


def refresh_basis(
    moment: torch.Tensor, basis: torch.Tensor, second: torch.Tensor, dim: int, *, first: bool
) -> None:
    """Set the basis to the moment's eigenvectors, or improve it by one power step, in place.

    second: squares in the rotated coordinates, permuted along ``dim`` as the basis is.
    """
    if first:
        basis.copy_(torch.linalg.eigh(moment)[1].flip(1))
        return
    sizes = (basis * (moment @ basis)).sum(0)
    order = sizes.argsort(descending=True)
    second.copy_(second.index_select(dim, order))
    basis.copy_(torch.linalg.qr(moment @ basis.index_select(1, order))[0])


def refresh_bases_by_mean(mean: torch.Tensor, state: State, *, first: bool) -> None:
    """Set the bases to the mean gradient's singular vectors, or improve them, in place."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if first:
        u, _, v = torch.linalg.svd(mean)
        for basis, found in ((left, u), (right, v.T)):
            if basis is not None:
                basis.copy_(found)
    elif left is not None and right is not None:
        left.copy_(_complete_basis(mean @ right))
        right.copy_(_complete_basis(mean.T @ left))
    else:
        for basis, own in ((left, mean), (right, mean.T)):
            if basis is not None:
                basis.copy_(_complete_basis(own @ (own.T @ basis)))


def _complete_basis(matrix: torch.Tensor) -> torch.Tensor:
    """Return the square Q of the QR decomposition."""
    square: torch.Tensor = torch.linalg.qr(matrix, mode="complete")[0]
    return square


def _start(state: State, gradient: torch.Tensor, group: Group) -> None:
    """Create the state of a matrix."""
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else gradient.dtype
    rows, columns = gradient.shape
    both = group["geometry"] == "bi"
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(gradient, dtype=dtype)
    for name, size, smaller in (
        ("left", rows, rows <= columns),
        ("right", columns, rows > columns),
    ):
        if size <= group["longest"] and (both or smaller):
            basis = gradient.new_zeros(size, size, dtype=dtype)
            if group["source"] == "2nd":
                state[name] = torch.zeros_like(basis)
            state[f"{name}_basis"] = basis


def _rotate(matrix: torch.Tensor, state: State, *, back: bool = False) -> torch.Tensor:
    """Return U^T matrix V, or U matrix V^T."""
    left, right = state.get("left_basis"), state.get("right_basis")
    found = matrix
    if left is not None:
        found = (left if back else left.T) @ found
    if right is not None:
        found = found @ (right.T if back else right)
    return found if found is not matrix else matrix.clone()
