"""Which results selective recomputation keeps: those of products over long sums.

Making a product again takes time in proportion to the length of its sum, whatever its size. So, as
in pricing (:mod:`fxpart.pricing.joint_recompute`), a result is made again only if that frees, for
each operation it takes, at least ``WORTH`` times the bytes that recomputing everything frees for
each operation of the forward.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fxpart.compat import TorchDispatchMode, get_write_count

WORTH = 2.0


class SelectiveRecomputePolicy:
    """Decides by the first call of a piece, product by product in their order."""

    def __init__(self) -> None:
        """Nothing is known: the first call keeps all products."""
        self._save: list[bool] | None = None

    def keeping(self) -> ProductCacheMode:
        """For one call: the context of its forward. ``again()`` is that of when it runs again."""
        return ProductCacheMode(self._save)

    def decide(self, first: ProductCacheMode, freed: int) -> None:
        """From now on only long products, and none that is changed in place afterwards.

        first: those of the first call. freed: bytes that autograd would have saved.
        """
        total = sum(operations for operations, _ in first.costs) or 1.0
        self._save = [
            held / max(operations, 1.0) < WORTH * freed / total and intact
            for (operations, held), intact in zip(first.costs, first.settle(), strict=True)
        ]


class ProductCacheMode(TorchDispatchMode):
    """The results of products that one call keeps. costs: operations and bytes of each product."""

    def __init__(self, save: list[bool] | None) -> None:
        """save: which, in their order; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[tuple[float, float]] = []
        self._save = save
        self._kept: list[Any] = []
        self._made: list[Any] = []  # of a first call: as the ops gave them

    def settle(self) -> list[bool]:
        """After a first call: by product, whether nothing has changed it since; others go."""
        found = [all(get_write_count(t) == 0 for t in _tensors(made)) for made in self._made]
        self._kept = [
            kept if intact else None for kept, intact in zip(self._kept, found, strict=True)
        ]
        self._made = []  # they hold the autograd graph
        return found

    def again(self) -> ProductReplayMode:
        """The context in which the call runs again; it may be entered once."""
        return ProductReplayMode(self)

    def give(self, place: int) -> Any:
        """A result, which is not kept any longer; None where there is none."""
        kept, self._kept[place] = self._kept[place], None
        return kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op, and keep its result if it is a product that is wanted."""
        found = func(*args, **(kwargs or {}))
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


class ProductReplayMode(TorchDispatchMode):
    """Ops run, but products that were kept do not."""

    def __init__(self, products: ProductCacheMode) -> None:
        """products: those of the call that runs again."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The result that was kept, or the op's."""
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
    """The operations and the bytes of a product's result; None for any other op."""
    name = op.name().removeprefix("aten::").split(".")[0]
    if name in ("mm", "bmm"):
        left, right = args[:2]
    elif name in ("addmm", "baddbmm"):
        left, right = args[1:3]
    elif name == "convolution":
        return _convolution(args)
    elif name.startswith("_scaled_dot_product"):
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
