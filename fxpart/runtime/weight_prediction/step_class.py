"""The torch.optim class whose step an optimizer makes, also where it is a subclass of it."""

from __future__ import annotations

import torch

from fxpart.compat import step_of, steps_as_its_class

# What a subclass may define without another step: everything else that its base has, too, counts
# as a step of its own.
_HARMLESS = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__orig_bases__", "__parameters__", "__qualname__", "__repr__", "__slots__", "__str__",
        "__static_attributes__", "__weakref__", "add_param_group", "step",
    }
)  # fmt: skip


def step_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The class of torch.optim whose update this is; None where the optimizer has its own.

    A subclass counts as its base if it overrides neither ``step`` nor anything that ``step`` may
    use. The step that a learning-rate scheduler puts on the instance is the class's.
    """
    kind = type(optimizer)
    if not steps_as_its_class(optimizer):
        return None
    for base in kind.__mro__:
        if getattr(torch.optim, base.__name__, None) is base and base is not torch.optim.Optimizer:
            return base if step_of(kind) is step_of(base) else None
        if any(hasattr(base.__mro__[1], name) for name in vars(base) if name not in _HARMLESS):
            return None
    return None
