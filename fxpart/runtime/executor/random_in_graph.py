"""Random ops as functions of a seed, which compiled graphs can contain.

An op draws by the seed tensor, so its numbers equal those of :func:`fxpart.rng.seeded`, and a
recomputation draws them again. The seed is an operand, so no graph depends on its value. Dropout is
a product with random factors, which a compiler fuses with its neighbors, also in attention on CPUs.
Any other op runs as it is; its backward runs its forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpart.compat import record_autograd
from fxpart.rng import draw_from, dropout_factors, mix

_ATEN = torch.ops.aten
_DROPOUT = _ATEN.dropout.default
_ATTENTION = _ATEN.scaled_dot_product_attention.default


@dataclass(frozen=True)
class RandomCall:
    """A random op and its arguments. slots: "t" for a tensor, "i" for a size, else the argument."""

    op: Any
    slots: tuple[Any, ...]
    structure: Any
    device: torch.device | None = None

    def seeded(
        self, seed: torch.Tensor, like: Sequence[torch.Tensor], run: Callable[[], Any]
    ) -> Any:
        """Return ``run()``, which draws by the seed. like: its tensors."""
        with draw_from(int(seed), self.op, like, {"device": self.device}):
            return run()

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the op's results for these tensors and sizes."""
        given = {"t": iter(tensors), "i": iter(sizes)}
        leaves = [next(given[kind]) if kind else value for kind, value in self.slots]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        found = self.op(*args, **kwargs)
        return list(found) if isinstance(found, tuple | list) else [found]


_CALLS: list[RandomCall] = []
_NUMBERS: dict[str, int] = {}


def make_seed(key: int, index: int) -> torch.Tensor:
    """Return the seed of the random op ``index`` as a tensor on the host."""
    return torch.tensor(mix(key, index))


def call_with_seed(
    seed: Any,
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: Callable[[Any], str],
    as_node: Callable[[Any], Callable[..., Any]],
    device: torch.device,
) -> Any:
    """Trace ``op(*args, **kwargs)`` with a seed.

    kind: "t" for a tensor and "i" for a size that are traced, else "". as_node: traces an op.
    device: of the stage.
    """
    if op is _DROPOUT and len(args) == 3 and args[2] is True and not kwargs:
        like = as_node(_ATEN.detach.default)(args[0])
        factors = as_node(torch.ops.fxpart.draw_factors.default)(seed, like, args[1])
        return as_node(_ATEN.mul.Tensor)(args[0], factors)
    if op is _ATTENTION and device.type == "cpu" and _is_plain_attention(args, kwargs):
        return _attend(seed, args, kwargs["scale"], as_node)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = [kind(leaf) for leaf in leaves]
    slots = tuple((k, None if k else leaf) for k, leaf in zip(kinds, leaves, strict=True))
    call = RandomCall(op, slots, structure, kwargs.get("device"))
    number = _NUMBERS.setdefault(repr(call), len(_CALLS))
    if number == len(_CALLS):
        _CALLS.append(call)
    tensors = [leaf for k, leaf in zip(kinds, leaves, strict=True) if k == "t"]
    sizes = [leaf for k, leaf in zip(kinds, leaves, strict=True) if k == "i"]
    found = as_node(torch.ops.fxpart.run_random_call.default)(seed, number, tensors, sizes)
    many = str(op._schema.returns[0].type).endswith("[]") or len(op._schema.returns) > 1
    return found if many else found[0]


def _is_plain_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention has no mask but a causal one, and as many heads for keys."""
    return len(args) in (5, 6) and args[3] is None and list(kwargs) == ["scale"]


def _attend(
    seed: Any, args: tuple[Any, ...], scale: float, as_node: Callable[[Any], Callable[..., Any]]
) -> Any:
    """Trace attention with dropout as torch computes it on CPUs, where it has no fused kernel."""
    query, key, value, _, p, *causal = args
    multiply, product = as_node(_ATEN.mul.Tensor), as_node(_ATEN.matmul.default)
    turned = as_node(_ATEN.transpose.int)(multiply(key, scale**0.5), -2, -1)
    scores = product(multiply(query, scale**0.5), turned)
    if causal and causal[0]:
        ones = as_node(_ATEN.ones_like.default)(scores, dtype=torch.bool)
        later = as_node(_ATEN.triu.default)(ones, 1)
        scores = as_node(_ATEN.masked_fill.Scalar)(scores, later, float("-inf"))
    weights = as_node(_ATEN._safe_softmax.default)(scores, -1)
    like = as_node(_ATEN.detach.default)(weights)
    factors = as_node(torch.ops.fxpart.draw_factors.default)(seed, like, p)
    return product(multiply(weights, factors), value)


@torch.library.custom_op("fxpart::draw_factors", mutates_args=())
def draw_factors(seed: torch.Tensor, like: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factors of dropout: 0 with probability p, else 1 / (1 - p)."""
    return torch.empty_like(like).copy_(dropout_factors(int(seed), p, like))


@draw_factors.register_fake
def _(seed: torch.Tensor, like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("fxpart::run_random_call", mutates_args=())
def run_random_call(
    seed: torch.Tensor, number: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Run a random op. number: of its :class:`RandomCall`."""
    call = _CALLS[number]
    found: list[torch.Tensor] = call.seeded(
        seed, tensors, lambda: _separate(call.run(tensors, sizes), tensors)
    )
    return found


@run_random_call.register_fake
def _(
    seed: torch.Tensor, number: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    return _CALLS[number].run(tensors, sizes)


@torch.library.custom_op("fxpart::run_random_backward", mutates_args=())
def run_random_backward(
    seed: torch.Tensor, number: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the gradients of the floating-point tensors; the forward runs again."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]

    call = _CALLS[number]
    with record_autograd():
        results = call.seeded(seed, tensors, lambda: call.run(leaves, sizes))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    found = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if gradient is None else torch.empty_like(leaf).copy_(gradient)
        for leaf, gradient in zip(wanted, found, strict=True)
    ]


@run_random_backward.register_fake
def _(
    seed: torch.Tensor, number: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    return [torch.empty_like(t) for t in tensors if t.is_floating_point()]


def _separate(results: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results that share no memory with operands or each other, as custom ops have to."""
    seen = {t.untyped_storage().data_ptr() for t in tensors}
    found = []
    for result in results:
        at = result.untyped_storage().data_ptr()
        found.append(result.clone() if at in seen else result)
        seen.add(at)
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    seed, ctx.number, tensors, ctx.sizes = inputs
    ctx.save_for_backward(seed, *tensors)


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    seed, *tensors = ctx.saved_tensors
    found = iter(run_random_backward(seed, ctx.number, tensors, ctx.sizes, gradients))
    found_by_tensor = [next(found) if t.is_floating_point() else None for t in tensors]
    return None, None, found_by_tensor, [None] * len(ctx.sizes)


run_random_call.register_autograd(_backward, setup_context=_save)
