"""Kernels that a GPU would launch: ops that write memory, counted as torch dispatches them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxpart.compat import TorchDispatchMode

# Ops that allocate memory and write nothing.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Ops that copy a tensor and write to the copy: two kernels.
_COPY_AND_WRITE = {
    "index_add", "index_copy", "index_fill", "index_put", "masked_fill", "masked_scatter",
    "scatter", "scatter_add", "select_scatter", "slice_scatter",
}  # fmt: skip


class KernelCount(TorchDispatchMode):
    """Counts the ops that write memory while it is active, by name.

    An op launches a kernel if it writes to an argument or returns memory of its own. Views,
    detached tensors, allocations and questions about sizes launch none. Backward passes on CPUs run
    in the calling thread, so they are counted too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and count it."""
        result = func(*args, **(kwargs or {}))
        if launches_kernel(func, args, kwargs or {}, result):
            twice = func._schema.name.split("::")[1] in _COPY_AND_WRITE
            self.kernels[str(func).removeprefix("aten.")] += 2 if twice else 1
        return result


def launches_kernel(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether the op writes to an argument or to memory that it returns."""
    if func._schema.name.split("::")[1] in _ALLOCATIONS:
        return False
    if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return True
    given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    found = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return any(x.numel() and _memory(x) not in given for x in found)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
