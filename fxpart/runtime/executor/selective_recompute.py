"""The results that selective recomputation stores: those of products over long sums.

The time to recompute an element of a product is proportional to the length of its sum. As in
pricing (:mod:`fxpart.pricing.recompute_costs`), a result is recomputed only if it frees, per
operation, at least ``WORTH`` times the bytes that full recomputation frees per operation of the
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from fxpart.compat import TorchDispatchMode, get_write_count, storage_address

WORTH = 2.0


class SelectiveRecomputePolicy:
    """Selects products to store from the first call of a piece, in their order."""

    def __init__(self) -> None:
        """Start without a decision: the first call stores all products."""
        self._save: list[bool] | None = None

    def keeping(self) -> ProductCacheMode:
        """Return the context of one forward; its ``again()`` is that of the recomputation."""
        return ProductCacheMode(self._save)

    def decide(self, first: ProductCacheMode, freed: int) -> None:
        """Store only long products that are not changed in place afterwards.

        first: the products of the first call, which discards the others too. freed: bytes that full
        recomputation frees.
        """
        total = sum(operations for operations, _ in first.costs) or 1.0
        self._save = [
            size / max(operations, 1.0) < WORTH * freed / total and intact
            for (operations, size), intact in zip(first.costs, first.settle(), strict=True)
        ]
        first.keep(self._save)


class ProductCacheMode(TorchDispatchMode):
    """Stores results of products of one call. costs: operations and bytes of each product."""

    def __init__(self, save: list[bool] | None) -> None:
        """save: whether to store each product, in their order; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[tuple[float, float]] = []
        self._save = save
        self._kept: list[Any] = []
        # Of a first call: results as the ops returned them, and storages that ops wrote since.
        self._made: list[Any] = []
        self._written: set[object] = set()

    def settle(self) -> list[bool]:
        """Return by product whether it was not changed since."""
        found = [
            all(
                get_write_count(t) == 0 and storage_address(t) not in self._written
                for t in _tensors(made)
            )
            for made in self._made
        ]
        self._made = []  # They keep the autograd graph alive.
        return found

    def keep(self, save: list[bool]) -> None:
        """Discard the results of products that are not stored, by place."""
        self._kept = [
            kept if stored else None for kept, stored in zip(self._kept, save, strict=True)
        ]

    def again(self) -> ProductReplayMode:
        """Return the context in which the call is recomputed; it can be entered once."""
        return ProductReplayMode(self)

    def give(self, place: int) -> Any:
        """Return and remove a stored result; None if it was not stored."""
        kept, self._kept[place] = self._kept[place], None
        return kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op, and store its result if it is a selected product."""
        found = func(*args, **(kwargs or {}))
        if self._save is None:
            self._note_writes(func, args, kwargs or {})
        cost = _cost(func, args)
        if cost is not None:
            kept = None
            if self._save is None:
                self.costs.append(cost)
                self._made.append(found)
            if self._save is None or self._save[len(self._kept)]:
                many = [t.detach() if isinstance(t, torch.Tensor) else t for t in _parts(found)]
                kept = tuple(many) if isinstance(found, tuple) else many[0]
            self._kept.append(kept)
        return found

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record what an op writes; parts of ``unsafe_chunk`` do not share a write count."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                many = given if isinstance(given, (list, tuple)) else (given,)
                self._written.update(
                    storage_address(t) for t in many if isinstance(t, torch.Tensor)
                )


class ProductReplayMode(TorchDispatchMode):
    """Skips stored products while a call is recomputed."""

    def __init__(self, products: ProductCacheMode) -> None:
        """products: those of the call that is recomputed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the stored result, or run the op."""
        if _cost(func, args) is not None:
            kept = self._products.give(self._place)
            self._place += 1
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))


def _parts(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [part for part in _parts(found) if isinstance(part, torch.Tensor)]


def _cost(op: Any, args: tuple[Any, ...]) -> tuple[float, float] | None:
    """Return the operations and the bytes of a product's result; None for any other op."""
    name = op.name().removeprefix("aten::").split(".")[0]
    if name in ("mm", "bmm"):
        left, right = args[:2]
    elif name in ("addmm", "baddbmm"):
        left, right = args[1:3]
    elif name == "convolution":
        return _convolution(args)
    elif name.startswith("_scaled_dot_product") or name == "fxpart::attend_rows":
        query, key = args[:2]
        sums = prod(query.shape[:-1]) * key.shape[-2]
        return 4.0 * sums * query.shape[-1], float(query.nbytes)
    else:
        return None
    size = prod(left.shape[:-1]) * right.shape[-1]
    return 2.0 * size * left.shape[-1], float(size * left.itemsize)


def _convolution(args: tuple[Any, ...]) -> tuple[float, float]:
    given, weight = args[:2]
    stride, transposed = args[3], args[6]
    places = prod(
        -(-size // step) if not transposed else size * step
        for size, step in zip(given.shape[2:], stride, strict=True)
    )
    size = given.shape[0] * places * weight.shape[1 if transposed else 0]
    sums = prod(weight.shape[1:]) if not transposed else weight.shape[0]
    return 2.0 * size * sums, float(size * given.itemsize)
