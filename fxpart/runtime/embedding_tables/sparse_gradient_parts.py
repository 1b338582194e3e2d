"""A sparse gradient as the parts that each backward added, in single-process order.

Torch adds sparse gradients by concatenating their rows, so the result, and the bits of what an
optimizer sums, depend on the order of the parts. So parts are stored, those of one microbatch are
put into the order of a single process, and then summed as torch's autograd does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SparseGradientParts:
    """Rows of a sparse gradient. lengths: number of rows of each backward, in order.

    ids: [n] int64. values: [n, ...], like the table's rows.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, gradients: Sequence[torch.Tensor]) -> SparseGradientParts:
        """Concatenate the gradients of at least one backward."""
        # a compiled stage may return a dense gradient: take its non-zero rows
        rows = [g if g.is_sparse else g.to_sparse(1) for g in gradients]
        return cls(
            tuple(g._nnz() for g in rows),
            torch.cat([g._indices()[0] for g in rows]),
            torch.cat([g._values() for g in rows]),
        )

    def copy(self) -> SparseGradientParts:
        """Return a copy in memory of its own."""
        return SparseGradientParts(self.lengths, self.ids.clone(), self.values.clone())

    def gradient(self, like: torch.Tensor) -> torch.Tensor:
        """Return the sparse gradient of the parameter ``like``, summed as autograd does."""
        total: torch.Tensor | None = None
        with torch.no_grad():
            for ids, values in zip(
                self.ids.split(self.lengths), self.values.split(self.lengths), strict=True
            ):
                part = torch.sparse_coo_tensor(
                    ids.unsqueeze(0), values, like.shape, check_invariants=False
                )
                total = part if total is None else total.add_(part)
        assert total is not None, "there is a part"
        return total


def make_sparse_target(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of a flat view, to which sparse gradients can be added.

    torch 2.13 on the CPU adds coalesced gradients of one dim at twice the view's storage offset,
    outside of the view. The returned tensor has a storage that begins with it.
    """
    if not view.numel():
        return view
    first = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[first : first + view.nbytes]
    return view.new_empty(0).set_(storage, 0, view.shape, (1,))


def merge_parts(parts: Iterable[tuple[Iterable[int], SparseGradientParts]]) -> SparseGradientParts:
    """Merge parts by the numbers given with each (ascending), in order within a number.

    numbers: of each of the part's lengths, such as its microbatch. Lengths of one number are added.
    """
    pieces: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    for order, (numbers, part) in enumerate(parts):
        ids, values = part.ids.split(part.lengths), part.values.split(part.lengths)
        pieces += [
            (number, order, *both) for number, *both in zip(numbers, ids, values, strict=True)
        ]
    pieces.sort(key=lambda piece: piece[:2])
    lengths: dict[int, int] = {}
    for number, _, ids, _ in pieces:
        lengths[number] = lengths.get(number, 0) + len(ids)
    return SparseGradientParts(
        tuple(lengths.values()),
        torch.cat([ids for _, _, ids, _ in pieces]),
        torch.cat([values for *_, values in pieces]),
    )


def get_gradient_values(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the elements of a parameter's gradient, to be changed in place; None without
    one.

    A sparse gradient is coalesced first: duplicate rows are summed in their order, as every
    optimizer does it.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return gradient
    if not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()


class SparseGradientCapture:
    """Gradients that backwards have produced for watched parameters."""

    def __init__(self) -> None:
        """Create a capture without parameters."""
        self._captured: dict[int, list[torch.Tensor]] = {}

    def watch(self, parameter: torch.Tensor) -> None:
        """Capture the gradients of a parameter from now on."""
        if id(parameter) not in self._captured:
            self._captured[id(parameter)] = []
            parameter.register_post_accumulate_grad_hook(self._capture)

    def pending(self, parameter: torch.Tensor) -> SparseGradientParts | None:
        """Return the captured gradients of a parameter, or None."""
        captured = self._captured.get(id(parameter))
        return SparseGradientParts.of(captured) if captured else None

    def drop(self, parameter: torch.Tensor) -> None:
        """Drop the captured gradients of a parameter."""
        self._captured.get(id(parameter), []).clear()

    def reset(self) -> None:
        """Drop all captured gradients."""
        for captured in self._captured.values():
            captured.clear()

    def _capture(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._captured[id(parameter)].append(parameter.grad)
            parameter.grad = None
