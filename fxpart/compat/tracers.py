"""Tracers: record operations, and control what they record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx


def record_operations(
    function: Callable[..., Any], *args: Any, below_autograd: bool = False
) -> fx.GraphModule:
    """Record the operations of ``function(*args)`` on its tensors, before or below autograd.

    Uses make_fx with ``pre_dispatch``, the recorder underneath torch.export.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    recorded: fx.GraphModule = make_fx(
        function, tracing_mode="real", pre_dispatch=not below_autograd
    )(*args)
    return recorded


@contextmanager
def python_dispatcher(mode: Any = None) -> Iterator[None]:
    """Run composite ops through their Python decompositions, which accept symbolic sizes.

    mode: a fake tensor mode, whose cache of earlier results is disabled meanwhile. Uses
    ``torch._dispatch.python.enable_python_dispatcher``, like torch.export, and
    ``FakeTensorMode.cache_enabled``; does nothing if they are missing.
    """
    try:
        from torch._dispatch.python import enable_python_dispatcher
    except ImportError:
        yield
        return
    cached = getattr(mode, "cache_enabled", None)
    try:
        if cached:
            mode.cache_enabled = False
        with enable_python_dispatcher():
            yield
    finally:
        if cached:
            mode.cache_enabled = cached


@contextmanager
def watch_casts() -> Iterator[list[tuple[torch.Tensor, torch.dtype]]]:
    """Yield a list of the (tensor, dtype) of every conversion in this context, in order.

    Uses ``torch.utils._python_dispatch.TorchDispatchMode``, which sees autocast's conversions.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[torch.Tensor, torch.dtype]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default and "dtype" in (kwargs or {}):
                seen.append((args[0], kwargs["dtype"]))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        yield seen


@contextmanager
def deferred_code() -> Iterator[None]:
    """Defer code generation of graph modules created or changed in this context to their first
    call.

    Tracers and passes create a dozen of them for one graph and call none. Patches
    ``GraphModule.recompile``, which is public, and copies its pytree state (``_codegen``);
    ``recompile()`` after the context generates the code immediately.
    """
    from torch.fx.graph import _PyTreeCodeGen

    original = fx.GraphModule.recompile

    def recompile(self: Any) -> None:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            original(module)
            return type(module).forward(module, *args, **kwargs)

        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec = codegen.pytree_info.in_spec
            self._out_spec = codegen.pytree_info.out_spec
        type(self).forward = forward

    fx.GraphModule.recompile = recompile  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        fx.GraphModule.recompile = original  # type: ignore[method-assign]


def active_tracer() -> Any | None:
    """Return the active tracer (make_fx, torch.export), or None.

    Uses ``torch.fx.experimental.proxy_tensor.get_proxy_mode``.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def traced_node(tensor: torch.Tensor, tracer: Any) -> fx.Node | None:
    """Return the node of a tensor in the tracer's graph, None for an unknown tensor.

    Uses ``torch.fx.experimental.proxy_tensor.get_proxy_slot``.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    found = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


def trace_as(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Register the tensor as the node's value in the tracer's graph.

    Uses ``torch.fx.experimental.proxy_tensor.track_tensor_tree``, like tracers after each op.
    """
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    track_tensor_tree(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


@contextmanager
def pause_tracing() -> Iterator[None]:
    """Hide operations in this context from all tracers.

    Uses ``torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing`` and
    ``torch._C.DisableTorchFunction``, which also disables function modes.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
        yield
