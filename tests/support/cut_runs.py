"""Run an op's local form on every mesh rank and put the pieces together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpart import collectives as C
from fxpart.sharding import Mesh, Partial, Placements, Shard, indices, parse_placements


def piece(whole: torch.Tensor, where: Placements, mesh: Mesh, mesh_rank: int) -> torch.Tensor:
    """What a mesh rank holds of a tensor; replicated axes leave it whole."""
    for dim, index in enumerate(indices(whole.shape, where, mesh, mesh_rank)):
        whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def joined(
    pieces: list[torch.Tensor], where: Placements, mesh: Mesh, shape: tuple[int, ...]
) -> torch.Tensor:
    """The whole tensor: pieces in place, partial axes summed, replicated axes checked."""
    whole = torch.zeros(shape, dtype=pieces[0].dtype)
    for mesh_rank, part in enumerate(pieces):
        place = mesh.coordinate(mesh_rank)
        twin = mesh.mesh_rank(
            tuple(
                p if isinstance(w, Shard | Partial) else 0
                for p, w in zip(place, where, strict=True)
            )
        )
        if twin != mesh_rank:
            torch.testing.assert_close(part, pieces[twin], equal_nan=True)
            continue
        held = indices(shape, where, mesh, mesh_rank)
        if not shape:
            whole += part.detach()
            continue
        grid = torch.meshgrid(*(torch.from_numpy(h) for h in held), indexing="ij")
        whole[grid] += part.detach()
    return whole


def compare(
    mesh: Mesh,
    form: Callable[..., Any],
    op: Callable[..., Any],
    operands: dict[str, tuple[torch.Tensor | None, str]],
    result: str,
    *,
    hub: C.InProcessHub | None = None,
    gradients: dict[str, str] | None = None,
) -> None:
    """The form on pieces (operand: tensor, placements) against the op on the whole, both ways.

    form(communicator, **operands) and op(**operands) return one tensor. gradients: placements of
    gradients that are not those of the operand with Partial for Replicate.
    """
    placements = {k: parse_placements(text, mesh) for k, (_, text) in operands.items()}
    floating = [
        k for k, (t, _) in operands.items() if t is not None and t.is_floating_point()
        and not k.startswith("fixed_")
    ]  # fmt: skip
    whole = {k: None if t is None else t.clone() for k, (t, _) in operands.items()}
    for k in floating:
        whole[k].requires_grad_()  # type: ignore[union-attr]
    want = op(**whole)
    where = parse_placements(result, mesh)
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(want, [whole[k] for k in floating], grad) if floating else ()
    used = [
        any(isinstance(p[axis], Shard | Partial) for p in (*placements.values(), where))
        for axis in range(len(mesh.axes))
    ]

    def mesh_rank(comm: C.Communicator) -> tuple[torch.Tensor, list[torch.Tensor]]:
        local = {
            k: None if t is None else piece(t, placements[k], mesh, comm.mesh_rank).clone()
            for k, (t, _) in operands.items()
        }
        for k in floating:
            local[k].requires_grad_()  # type: ignore[union-attr]
        found = form(comm, **local)
        held = tuple(p if isinstance(p, Shard) else None for p in where)
        back_grad = piece(grad, held, mesh, comm.mesh_rank)
        back = (
            torch.autograd.grad(found, [local[k] for k in floating], back_grad) if floating else ()
        )
        fake = C.FakeCommunicator(mesh, comm.mesh_rank)
        with torch.no_grad():
            assert form(fake, **local).shape == found.shape
        return found.detach(), list(back)

    runs = (hub or C.InProcessHub(mesh, timeout=20)).run(mesh_rank)
    torch.testing.assert_close(
        joined([y for y, _ in runs], where, mesh, tuple(want.shape)), want.detach(), equal_nan=True
    )
    for index, k in enumerate(floating):
        text = (gradients or {}).get(k)
        at = (
            parse_placements(text, mesh)
            if text is not None
            else tuple(
                p if isinstance(p, Shard) or not u else Partial()
                for p, u in zip(placements[k], used, strict=True)
            )
        )
        total = joined([g[index] for _, g in runs], at, mesh, tuple(grads[index].shape))
        torch.testing.assert_close(total, grads[index], equal_nan=True)
