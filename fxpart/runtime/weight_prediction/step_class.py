"""The torch.optim class whose step an optimizer performs, for subclasses too."""

from __future__ import annotations

import torch

from fxpart.compat import step_of, steps_as_its_class

# Attributes that a subclass may define without changing the step; overriding any other attribute of
# its base counts as a different step.
_HARMLESS = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__orig_bases__", "__parameters__", "__qualname__", "__repr__", "__slots__", "__str__",
        "__static_attributes__", "__weakref__", "add_param_group", "step",
    }
)  # fmt: skip


def step_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the torch.optim class with the same update, or None if the optimizer has its own.

    A subclass counts as its base if it overrides neither ``step`` nor anything that ``step`` may
    use. A step that a learning-rate scheduler wraps on the instance counts as the class's.
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
