"""Private state of modules, ops and autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

T = TypeVar("T")


def tensor_slots(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
    """Yield every (dict, key) of a parameter or buffer of the model, to replace it in place.

    Uses nn.Module's ``_parameters`` and ``_buffers``, since setattr rejects other kinds of tensors.
    """
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    yield slots, name  # type: ignore[misc]


def graph_name(name: str) -> str:
    """Return a state name, changed if its first part is an attribute of every GraphModule."""
    first, dot, rest = name.partition(".")
    while hasattr(fx.GraphModule, first) or first == "meta":
        first += "_"
    return first + dot + rest


def replaced_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the original name of each state name that :func:`graph_name` has changed."""
    return {main: a for a, main in aliases.items() if a != main and graph_name(a) == main}


def own_backward(function: object) -> type | None:
    """Return the torch.autograd.Function class of an autograd node, None for an op's node."""
    if not isinstance(function, torch.autograd.function.BackwardCFunction):
        return None
    return getattr(function, "_forward_cls", type(function))


def unwrapped(value: T) -> T:
    """Return the module inside the result of torch.compile; other objects unchanged."""
    inside = getattr(value, "_orig_mod", None)
    return cast(T, inside) if isinstance(inside, nn.Module) else value


def global_module_hooks() -> list[dict[Any, Any]]:
    """Return the global forward and backward hooks of all modules, by kind.

    Uses ``torch.nn.modules.module._global_forward_hooks`` and similar tables, if they exist.
    """
    names = (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )  # fmt: skip
    return [getattr(nn.modules.module, name, {}) for name in names]


@contextmanager
def disable_mask_detection() -> Iterator[None]:
    """Stop nn.Transformer from reading an attention mask to detect whether it is causal.

    This data-dependent control flow stops every tracer; its result is only a hint. Patches the
    private ``torch.nn.modules.transformer._detect_is_causal_mask``; does nothing if it is missing.
    """
    from torch.nn.modules import transformer

    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:
        yield
        return

    def given(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    transformer._detect_is_causal_mask = given
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


@contextmanager
def intercept_module_calls(handler: Callable[..., Any]) -> Iterator[None]:
    """Route every call of an nn.Module through ``handler(module, call, args, kwargs)``.

    ``call(module, *args, **kwargs)`` is the original behavior. Patches the private
    ``nn.Module._call_impl``, below the patches of tracers.
    """
    original = nn.Module._call_impl

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(self, original, args, kwargs)

    nn.Module._call_impl = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


def has_module_hooks() -> bool:
    """Return whether global module hooks are registered; True if unknown."""
    from torch.nn.modules import module

    tables = [value for name, value in vars(module).items() if _is_hook_table(name)]
    return not tables or any(tables)


def _is_hook_table(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def operation_schema(target: object) -> Any:
    """Return the schema of an op overload (name, arguments, returns); None for other objects.

    Uses ``torch._ops.OpOverload`` and its ``_schema``, which have no public name.
    """
    from torch._ops import OpOverload

    return target._schema if isinstance(target, OpOverload) else None


def has_kernel(operation: Any) -> bool:
    """Return whether torch's dispatcher runs the op overload, unlike TorchScript-only ops.

    Uses ``torch._C._dispatch_has_kernel``, which has no public name.
    """
    schema = operation_schema(operation)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(torch._C._dispatch_has_kernel(name))


def registering_module(operation: Any) -> str | None:
    """Return the module whose import registers a custom op (``torch.library.custom_op``).

    Uses ``torch._library.custom_ops.OPDEFS``; None for torch's own ops and if there is no such
    table.
    """
    try:
        from torch._library.custom_ops import OPDEFS
    except ImportError:
        return None
    namespace, name, *_ = str(operation).split(".")
    if (namespace, name) == ("fxpart", "experts"):  # a composite, which has no entry there
        return "fxpart.collectives.experts"
    known = OPDEFS.get(f"{namespace}::{name}")
    function = getattr(known, "_init_fn", None)
    module = getattr(function, "__module__", None)
    return module if isinstance(module, str) and not module.startswith("torch.") else None
