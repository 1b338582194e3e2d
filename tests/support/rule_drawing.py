"""Random arguments of ops: small shapes, real numbers in double or single precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from rule_soundness import Example

T = TypeVar("T")
ATEN = torch.ops.aten
Maker = Callable[["Draw"], Example]


class Draw:
    """A source of sizes, choices and tensors, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float32 if seed % 4 == 3 else torch.float64

    def size(self, low: int = 2, high: int = 7) -> int:
        """A size; uneven ones come as often as others."""
        return self.random.randint(low, high)

    def sizes(self, count: int, low: int = 2, high: int = 6) -> list[int]:
        """Several sizes."""
        return [self.size(low, high) for _ in range(count)]

    def pick(self, items: Sequence[T]) -> T:
        """One of them."""
        return self.random.choice(list(items))

    def yes(self) -> bool:
        """A coin."""
        return self.random.random() < 0.5

    def real(self, *shape: int) -> torch.Tensor:
        """Numbers from -1 to 1."""
        return (
            torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype) * 2 - 1
        )

    def chance(self, *shape: int) -> torch.Tensor:
        """Numbers from 0.1 to 0.9."""
        held = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return held.to(self.dtype) * 0.8 + 0.1

    def ints(self, below: int, *shape: int) -> torch.Tensor:
        """Numbers from 0 to below - 1."""
        return torch.randint(0, below, shape, generator=self.generator)

    def bools(self, *shape: int) -> torch.Tensor:
        """Truth values."""
        return self.ints(2, *shape).bool()

    def shape(self, low: int = 1, high: int = 3) -> list[int]:
        """Some dims; one may have size 1."""
        found = self.sizes(self.size(low, high), 2, 5)
        if len(found) > 1 and self.random.random() < 0.2:
            found[self.size(0, len(found) - 1)] = 1
        return found

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to this one."""
        found = [1 if self.random.random() < 0.3 else s for s in shape]
        return found[self.size(0, len(shape)) :] if self.random.random() < 0.3 else found

    def dim(self, rank: int) -> int:
        """A dim from either end."""
        return self.size(-rank, rank - 1)


def like(op: Any, *rest: Any, **kwargs: Any) -> Maker:
    """One tensor of any shape, then these arguments."""
    return lambda r: Example(op, (r.real(*r.shape()), *rest), kwargs)


def along(op: Any, *rest: Any, real: bool = True, **kwargs: Any) -> Maker:
    """One tensor of any shape, and one of its dims, then these arguments."""

    def make(r: Draw) -> Example:
        shape = r.sizes(r.size(1, 3), 2, 5)
        return Example(op, (r.real(*shape), r.dim(len(shape)), *rest), kwargs)

    return make
