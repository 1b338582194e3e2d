"""The one place that touches torch's private names: each function says what it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def storage_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key equal for two tensors that are the same view of one storage, meta tensors included.

    Uses the storage's C++ address (``_cdata``), because the data pointer of a meta tensor is 0;
    falls back to the data pointer, or to the tensor's own identity where there is none.
    """
    layout = (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )
    storage = tensor.untyped_storage()
    address = getattr(storage, "_cdata", None) or storage.data_ptr() or id(tensor)
    return (address, *layout)


def fake_mode(*, symbolic: bool = False) -> Any:
    """A FakeTensorMode that also takes real tensors; with symbolic shapes when asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not symbolic:
        return FakeTensorMode(allow_non_fake_inputs=True)
    # What torch.export itself gives its mode; without these it refuses symbolic inputs.
    env = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, export=True)


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


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this one is a view (``_base``), or itself."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile returned; any other module as it is."""
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else model


def has_unbacked_symbols(value: object) -> bool:
    """Whether a traced value's size, or the value itself, is a symbol that data decide."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return bool(free_unbacked_symbols(value))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data: a meta or a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def unflatten_output(exported: torch.export.ExportedProgram, leaves: list[Any]) -> Any:
    """``leaves`` put into the structure that the exported module's forward returned."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, exported.call_spec.out_spec)


def symbol_names(size: int | torch.SymInt) -> str | int:
    """A dim as a program writes it: an int, or the expression's text such as "s0*s1"."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else str(expression)
    return int(size)


def size_hint(size: int | torch.SymInt) -> int:
    """The size that a dim had when it was traced."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint)
    return int(size)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Failing fake kernels raise as ever, but torch does not also log a stack trace for each.

    For a first try that another follows. Filters the private logger ``torch._subclasses.
    fake_tensor``; where that is gone there is nothing to filter.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def without_traces(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(without_traces)
    try:
        yield
    finally:
        logger.removeFilter(without_traces)


@contextmanager
def mask_detection_off() -> Iterator[None]:
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


def record_operations(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The operations of ``function(*args)`` before autograd, run on real tensors and recorded.

    Uses make_fx with ``pre_dispatch``, the recorder underneath torch.export.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    recorded: fx.GraphModule = make_fx(function, tracing_mode="real", pre_dispatch=True)(*args)
    return recorded


@contextmanager
def python_dispatcher() -> Iterator[None]:
    """Composite ops go through their Python decompositions, which take symbolic sizes.

    Uses ``torch._dispatch.python.enable_python_dispatcher``, as torch.export does; does nothing
    where that is gone.
    """
    try:
        from torch._dispatch.python import enable_python_dispatcher
    except ImportError:
        yield
        return
    with enable_python_dispatcher():
        yield


@contextmanager
def watch_casts() -> Iterator[list[tuple[torch.Tensor, torch.dtype]]]:
    """The (tensor, dtype) of every conversion that ops make while the context is open, in order.

    Uses ``torch.utils._python_dispatch.TorchDispatchMode``, which sees what autocast converts.
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


def symbolic_input(mode: Any, example: torch.Tensor, dynamic: list[bool]) -> torch.Tensor:
    """A fake tensor like ``example`` in the mode, the chosen dims being symbols of its shape.

    Uses FakeTensorMode's ``from_tensor`` and the contexts of
    ``torch.fx.experimental.symbolic_shapes``; equal sizes share one symbol.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if d else DimDynamic.STATIC for d in dynamic]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    fake: torch.Tensor = mode.from_tensor(example, symbolic_context=context)
    return fake


@contextmanager
def guards_off(mode: Any) -> Iterator[None]:
    """No fake run in here may fix a symbol to the size it had when it was traced.

    Uses ``ShapeEnv.suppress_guards``; where there is none, or no symbolic shapes, nothing happens.
    """
    env = getattr(mode, "shape_env", None)
    suppress = getattr(env, "suppress_guards", None)
    context: AbstractContextManager[Any] = nullcontext() if suppress is None else suppress()
    with context:
        yield


def operation_schema(target: object) -> Any:
    """The schema of an op overload (name, arguments, returns with their aliases); None for others.

    Uses ``torch._ops.OpOverload`` and its ``_schema``, for which torch has no public name.
    """
    from torch._ops import OpOverload

    return target._schema if isinstance(target, OpOverload) else None


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


def floor_division(expression: Any, divisor: int) -> Any:
    """``expression // divisor`` as torch writes it in symbolic sizes.

    Uses ``torch.utils._sympy.functions.FloorDiv``.
    """
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(expression, divisor)


@contextmanager
def deferred_code() -> Iterator[None]:
    """Graph modules made or changed in here write and compile their Python code when first called.

    Tracers and passes make a dozen of them for one graph and call none. Patches
    ``GraphModule.recompile``, which is public, and copies what it keeps of a pytree code generator
    (``_codegen``); ``recompile()`` after the context makes the code at once.
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


@contextmanager
def watched_calls(handler: Callable[..., Any]) -> Iterator[None]:
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


def active_tracer() -> Any | None:
    """The tracer that records operations now (make_fx, torch.export), or None.

    Uses ``torch.fx.experimental.proxy_tensor.get_proxy_mode``.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def traced_node(tensor: torch.Tensor, tracer: Any) -> fx.Node | None:
    """The node whose value the tensor is in the tracer's graph, None for one it does not know.

    Uses ``torch.fx.experimental.proxy_tensor.get_proxy_slot``.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    found = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


def trace_as(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """From now on the tensor is the node's value in the tracer's graph.

    Uses ``torch.fx.experimental.proxy_tensor.track_tensor_tree``, as tracers do after each op.
    """
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    track_tensor_tree(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


@contextmanager
def untraced() -> Iterator[None]:
    """Operations in here are not recorded by any tracer.

    Uses ``torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing`` and
    ``torch._C.DisableTorchFunction``, which switches function modes off too.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
        yield


def like_fake(fake: Any) -> torch.Tensor:
    """A new fake tensor with the metadata of ``fake``, its gradient's too, and a new storage.

    With a gradient it is no leaf, as the result of an op is none. Not recorded by tracers.
    """
    with untraced(), fake.fake_mode:
        made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
        if fake.requires_grad:
            made.requires_grad_()
            made = made if fake.is_leaf else made.clone()
    return made


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a strided fake tensor whose value nobody knows (``FakeTensor.constant``)."""
    from torch._subclasses.fake_tensor import FakeTensor

    plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return plain and getattr(tensor, "constant", None) is None


def writes(tensor: torch.Tensor) -> int:
    """How often the tensor, or another view of its storage, was written (``_version``)."""
    return tensor._version


def storage_address(tensor: torch.Tensor) -> object:
    """Equal for two tensors that share storage, while both are alive (``_cdata``)."""
    storage = tensor.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr() or id(tensor)
