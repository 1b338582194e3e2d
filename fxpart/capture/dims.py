"""Which dim of each input carries the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxpart.errors import FxpartError, Problem


def resize(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """The tensor cut or repeated along ``dim`` to ``size`` rows; unchanged where ``dim`` is None."""
    if dim is None or tensor.shape[dim] == size:
        return tensor
    have = tensor.shape[dim]
    repeats = [1] * tensor.dim()
    repeats[dim] = -(-size // have)
    return tensor.detach().repeat(repeats).narrow(dim, 0, size).contiguous()


def settled(
    given: Mapping[str, int | None], names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> dict[str, int | None]:
    """The user's ``batch_dims`` with negative dims counted from the end; FXP109 lists every fault."""
    problems = []
    result: dict[str, int | None] = {}
    shapes = dict(zip(names, (t.shape for t in tensors), strict=True))
    for name, dim in given.items():
        if name not in shapes:
            why = f"there is no input of this name; the inputs are {', '.join(names)}"
        elif dim is not None and not -len(shapes[name]) <= dim < len(shapes[name]):
            why = f"dim {dim} is out of range for the shape {list(shapes[name])}"
        else:
            result[name] = dim if dim is None or dim >= 0 else dim + len(shapes[name])
            continue
        problems.append(
            Problem("FXP109", f"batch_dims[{name!r}]", why, "name an input and its dim")
        )
    if problems:
        raise FxpartError(problems)
    return result


def infer(
    whole: object,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    known: Mapping[str, int | None],
) -> tuple[int | None, ...]:
    """The batch dim of each input."""
    size = next((t.shape[0] for t in tensors if t.dim()), 0)
    return tuple(
        known[n] if n in known else (0 if t.dim() and t.shape[0] == size else None)
        for n, t in zip(names, tensors, strict=True)
    )
