"""Which calls work on each row by itself, and how their dims count on all rows.

Rows [n, *rest] that a mask [*lead] selects are kept in all rows [*lead, *rest]: dim d >= 1 of the
first is dim d + len(lead) - 1 of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.compat import operation_schema
from fxpart.compiler.graph_edit import value


class NoRuleError(Exception):
    """A call on selected rows has no form on all rows."""


@dataclass(frozen=True)
class SelectedRows:
    """Rows that a mask selects, in a tensor [*lead, *rest] of all rows.

    mask: bool [*lead]. A dim of the mask on which rows do not depend may have size 1 in all rows.
    computed: whether a call has computed them, from other rows that are safe.
    """

    all: fx.Node
    mask: fx.Node
    computed: bool = False

    @property
    def lead(self) -> int:
        """Return the number of dims of the mask."""
        return int(value(self.mask).dim())

    @property
    def rest(self) -> tuple[Any, ...]:
        """Return the sizes of one row."""
        return tuple(value(self.all).shape[self.lead :])


@dataclass(frozen=True)
class Places:
    """Indices of the True values of a mask: in one dim [n], or in all [n, dims] (dim None)."""

    mask: fx.Node
    dim: int | None


@dataclass(frozen=True)
class Count:
    """A number computed from the number of True values of masks, as a tensor [].

    rows: the mask whose number of True values it is; None for other numbers.
    """

    number: fx.Node
    rows: fx.Node | None = None


# Calls that compute each element by itself, without torch's tag.
_ELEMENTWISE = frozenset(
    "_to_copy alias celu clone contiguous detach divide dropout fill floor_divide full_like "
    "hardsigmoid hardswish hardtanh lift log_sigmoid multiply ones_like relu6 softplus subtract "
    "to type_as where zeros_like __and__ __or__ __xor__".split()
)

# Calls whose rows are rows of the result, if their dims are not the dim of the rows.
ROW_CALLS = frozenset(
    "all amax amin any argmax argmin cat chunk cosine_similarity cumsum flip gather glu "
    "linalg_norm linalg_vector_norm log_softmax logsumexp max mean min narrow norm prod select "
    "slice softmax sort split split_with_sizes squeeze stack std sum topk transpose unbind "
    "unsqueeze var".split()
)

# Losses that compute each element by itself and then reduce.
LOSSES = frozenset(
    "binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div "
    "l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss".split()
)

# Calls whose value or derivative is infinite, undefined or an error for values that a network may
# compute for rows that are not selected.
SENSITIVE = frozenset(
    "acos acosh asin atanh binary_cross_entropy cosh cosine_similarity digamma div divide "
    "embedding erfinv exp exp2 expm1 floor_divide fmod gather kl_div lgamma linalg_norm "
    "linalg_vector_norm log log10 log1p log2 logit norm poisson_nll_loss pow reciprocal remainder "
    "rsqrt sinh sqrt std tan true_divide var xlogy".split()
)

_DIMS = ("dim", "dim0", "dim1", "start_dim", "end_dim")


def is_elementwise(target: Any, name: str) -> bool:
    """Return whether a call computes each element by itself."""
    return torch.Tag.pointwise in target.tags or name in _ELEMENTWISE


def dims_on_all_rows(
    target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: SelectedRows
) -> tuple[list[Any], dict[str, Any], bool]:
    """Return the arguments of a call with dims of all rows, and whether it reduces the rows.

    The rows are reduced if their dim is in a list of dims, or if the dims are left out.
    """
    dims = 1 + len(rows.rest) + (name in ("unsqueeze", "stack"))
    moved, named, over_rows, given = list(args), dict(kwargs), False, False
    for position, declared in enumerate(operation_schema(target).arguments):
        if declared.name not in _DIMS:
            continue
        inside = position < len(args)
        dim = args[position] if inside else kwargs.get(declared.name, declared.default_value)
        if dim is None or dim == []:
            continue
        given = True
        several = isinstance(dim, list | tuple)
        listed = [d % dims for d in (dim if several else [dim])]
        over_rows |= 0 in listed
        found: Any = [d + rows.lead - 1 for d in listed if d]
        if 0 in listed:
            found = [*range(rows.lead), *found]
        elif not several:
            found = found[0]
        if inside:
            moved[position] = found
        else:
            named[declared.name] = found
    return moved, named, over_rows or not given


def reshaped(rows: SelectedRows, sizes: list[Any]) -> tuple[int, list[Any]]:
    """Return how many dims of a row become rows, and the new sizes of what is left of a row.

    sizes: of the selected rows; None: the number of rows, which is not in the graph.
    """
    first, after = sizes[0], list(sizes[1:])
    if first is None:
        return 0, after
    if first != -1 or -1 in after or None in after:
        raise NoRuleError
    rest = list(rows.rest)
    for dims in range(len(rest) + 1):
        if _product(rest[dims:]) == _product(after):
            return dims, after
    raise NoRuleError


def _product(sizes: list[Any]) -> Any:
    result = 1
    for size in sizes:
        if not isinstance(size, int):
            raise NoRuleError
        result *= size
    return result
