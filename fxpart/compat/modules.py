"""Modules, ops and autograd functions: what torch keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

T = TypeVar("T")


def tensor_slots(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
    """Every (dict, key) that holds a parameter or buffer of the model, to replace it in place.

    Uses nn.Module's ``_parameters`` and ``_buffers``: setattr would refuse tensors of another kind.
    """
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    yield slots, name  # type: ignore[misc]


def own_backward(function: object) -> type | None:
    """The torch.autograd.Function class behind a node of the autograd graph, None for an op's."""
    if not isinstance(function, torch.autograd.function.BackwardCFunction):
        return None
    return getattr(function, "_forward_cls", type(function))


def unwrapped(value: T) -> T:
    """The module inside what torch.compile returned; any other object as it is."""
    inside = getattr(value, "_orig_mod", None)
    return cast(T, inside) if isinstance(inside, nn.Module) else value


def global_module_hooks() -> list[dict[Any, Any]]:
    """The hooks that run for every module, of forward and backward, by kind.

    Uses ``torch.nn.modules.module._global_forward_hooks`` and the like, where they are.
    """
    names = (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )  # fmt: skip
    return [getattr(nn.modules.module, name, {}) for name in names]


@contextmanager
def disable_mask_detection() -> Iterator[None]:
    """nn.Transformer told not to look at the values of an attention mask to see if it is causal.

    The look is control flow that depends on data and stops every tracer; its answer is only a hint
    that an equal, explicit mask may be ignored. Patches the private
    ``torch.nn.modules.transformer._detect_is_causal_mask``; does nothing where that is gone.
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
    """Every call of an nn.Module goes through ``handler(module, call, args, kwargs)``.

    ``call(module, *args, **kwargs)`` is what torch would do. Patches the private
    ``nn.Module._call_impl``, below what tracers patch themselves.
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
    """Whether hooks are registered for all modules at once; also true where that is unknown."""
    from torch.nn.modules import module

    tables = [value for name, value in vars(module).items() if _is_hook_table(name)]
    return not tables or any(tables)


def _is_hook_table(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def operation_schema(target: object) -> Any:
    """The schema of an op overload (name, arguments, returns with their aliases); None for others.

    Uses ``torch._ops.OpOverload`` and its ``_schema``, for which torch has no public name.
    """
    from torch._ops import OpOverload

    return target._schema if isinstance(target, OpOverload) else None


def has_kernel(operation: Any) -> bool:
    """Whether torch's dispatcher runs the op overload; the others are TorchScript's own.

    Uses ``torch._C._dispatch_has_kernel``, for which torch has no public name.
    """
    schema = operation_schema(operation)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(torch._C._dispatch_has_kernel(name))


def registering_module(operation: Any) -> str | None:
    """The module whose import registers a custom op (``torch.library.custom_op``), if it is known.

    Looks in ``torch._library.custom_ops.OPDEFS``; None for torch's own ops and where there is no
    such table.
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
