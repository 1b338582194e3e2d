"""Active torch modes around a call: which are supported, and how.

torch's modes change what a module computes, and many of them are thread-local. A compiled program
runs in several threads and processes, and its operations are already recorded. So a mode applies to
all of them, or has no effect on any, or the call is rejected before it computes anything (FXP116).
``MODES`` lists the modes that are checked.

Process-wide modes apply to the stages as to a module: deterministic algorithms and their debug
mode, the precision of float32 products, anomaly detection. Random numbers depend only on the
program's seed, so a forked or seeded generator has no effect.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpart.accelerator import find_accelerator
from fxpart.compat import active_modes, default_device_of, has_modes, has_saved_tensor_hooks
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan

P = ParamSpec("P")
T = TypeVar("T")
_AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16}
_BY_MODE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
)  # fmt: skip
_COMPILING = threading.RLock()
_SMALLEST = 5e-324  # Equals zero in a thread that flushes denormal numbers.


class TrainerCallKind(enum.Enum):
    """The kind of a call, which determines the modes that matter."""

    COMPILE = enum.auto()
    MAKE = enum.auto()  # Creation of a trainer.
    TRAIN = enum.auto()  # Forward and backward.
    UPDATE = enum.auto()  # Only the optimizer's step.
    EVALUATE = enum.auto()
    STATE = enum.auto()  # Copies tensors, computes nothing.


_COMPUTES = frozenset(
    {TrainerCallKind.MAKE, TrainerCallKind.TRAIN, TrainerCallKind.UPDATE, TrainerCallKind.EVALUATE}
)


@dataclass(frozen=True)
class TorchModes:
    """The modes under which a program was compiled.

    dtype: torch's default. precision: of the program, "bf16" for autocast in bfloat16. device: type
    of its devices. change: returns which module of the model has changed its training or evaluation
    mode since, "" if none has.
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = "fp32"
    device: str = "cpu"
    change: Callable[[], str] | None = None

    @property
    def autocast_devices(self) -> tuple[str, ...]:
        """The device types whose autocast affects the program's tensors."""
        return ("cpu",) if self.device == "cpu" else ("cpu", self.device)

    def enter(self, kind: TrainerCallKind, where: str) -> AbstractContextManager[object] | None:
        """Return a context in which a call computes as without active modes.

        None if no mode is active. Raises FXP116 for unsupported modes.
        """
        if kind is TrainerCallKind.TRAIN and self.change is not None and (why := self.change()):
            raise error("FXP116", where=where, why=why, fix=_MODULES_FIX)
        if self._is_plain():
            return None
        problems = [
            Problem("FXP116", where, why, mode.fix)
            for mode in MODES
            if kind in mode.refused and (why := mode.read(self))
        ]
        if problems:
            raise FxpartError(problems)
        return self._disable_modes(kind)

    def _is_plain(self) -> bool:
        return (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and torch.get_default_dtype() is self.dtype
            and not any(torch.is_autocast_enabled(device) for device in self.autocast_devices)
            and not has_modes()
        )

    def _disable_modes(self, kind: TrainerCallKind) -> ExitStack:
        """Disable autocast and inference mode, and enable gradients except for evaluation."""
        stack = ExitStack()
        for device in self.autocast_devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if kind is not TrainerCallKind.EVALUATE:
            stack.enter_context(torch.enable_grad())
        return stack


def _find_autocast(ambient: TorchModes) -> str:
    for device in ambient.autocast_devices:
        if torch.is_autocast_enabled(device):
            active = torch.get_autocast_dtype(device)
            if active is not _AUTOCAST.get(ambient.precision):
                return (
                    f'torch.autocast("{device}", dtype={_format_dtype(active)}) is active, but the '
                    f'program has precision="{ambient.precision}"'
                )
    return ""


def _find_disabled_gradients(ambient: TorchModes) -> str:
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is active, which disables gradients"
    return "" if torch.is_grad_enabled() else "torch.no_grad is active, which disables gradients"


def _find_default_dtype(ambient: TorchModes) -> str:
    now = torch.get_default_dtype()
    if now is ambient.dtype:
        return ""
    return (
        f"the default dtype is {_format_dtype(now)}, but was "
        f"{_format_dtype(ambient.dtype)} when the program was compiled"
    )


def _find_default_device(ambient: TorchModes) -> str:
    for mode in active_modes():
        device = default_device_of(mode)
        if device is not None and device.type != "cpu":
            return f"the default device is {device}"
    return ""


def _find_user_mode(ambient: TorchModes) -> str:
    for mode in active_modes():
        kind = type(mode)
        if default_device_of(mode) is None and not kind.__module__.startswith("fxpart."):
            return f"the mode {kind.__qualname__} intercepts torch's operations"
    return ""


def _find_user_mode_at_capture(ambient: TorchModes) -> str:
    fakes = ("FakeTensorMode",)  # Of a model that was created under it.
    if all(type(mode).__name__ in fakes for mode in active_modes()):
        return ""
    return _find_user_mode(ambient)


def _find_saved_tensor_hooks(ambient: TorchModes) -> str:
    return "hooks on saved tensors are active" if has_saved_tensor_hooks() else ""


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TorchMode:
    """A mode that may be active around a call.

    read: returns why it is not supported, "" if it is not active or has no effect. refused: the
    kinds of calls that are then rejected.
    """

    name: str
    read: Callable[[TorchModes], str]
    refused: frozenset[TrainerCallKind]
    fix: str


_LEAVE = "leave the mode before the call"
_MODULES_FIX = "call train() and eval() before the program is compiled, or undo the change"
MODES = (
    TorchMode(
        "torch.autocast", _find_autocast, _COMPUTES | {TrainerCallKind.COMPILE},
        'compile with precision="bf16" for autocast in bfloat16, and leave the autocast region',
    ),
    TorchMode(
        "torch.no_grad and torch.inference_mode", _find_disabled_gradients,
        frozenset({TrainerCallKind.TRAIN}), _LEAVE,
    ),
    TorchMode(
        "torch.set_default_dtype", _find_default_dtype, _COMPUTES,
        "compile and train under the same default dtype",
    ),
    TorchMode(
        "torch.set_default_device", _find_default_device, _COMPUTES | {TrainerCallKind.COMPILE},
        "keep the default device, and pass device= to factory functions",
    ),
    TorchMode("TorchFunctionMode and TorchDispatchMode", _find_user_mode, _COMPUTES, _LEAVE),
    TorchMode(
        "TorchFunctionMode and TorchDispatchMode", _find_user_mode_at_capture,
        frozenset({TrainerCallKind.COMPILE}), _LEAVE,
    ),
    TorchMode(
        "torch.autograd.graph.saved_tensors_hooks", _find_saved_tensor_hooks,
        frozenset({TrainerCallKind.COMPILE, TrainerCallKind.TRAIN}), _LEAVE,
    ),
)  # fmt: skip


@contextmanager
def disable_torch_modes(ambient: TorchModes, kind: TrainerCallKind, where: str) -> Iterator[None]:
    """Run the context without active modes; FXP116 for unsupported ones."""
    stack = ambient.enter(kind, where)
    if stack is None:
        yield
        return
    with stack:
        yield


def guard_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Check the modes around a function that compiles a model, and run it without them.

    The program's autocast is determined by the arguments ``precision`` and ``plan``, or by the
    Program of a method. Threads compile one after the other: tracing replaces functions of torch.
    """
    known = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = _bind(known, function.__name__, args, kwargs)
        model = given.get("model")
        if isinstance(model, nn.Module):
            _check_tensors(model)
            _warn_about_evaluation_mode(model)
        ambient = TorchModes(precision=_get_precision(given), device=find_accelerator() or "cpu")
        caller = f"fxpart.{function.__name__}"
        with _COMPILING, disable_torch_modes(ambient, TrainerCallKind.COMPILE, caller):
            return function(*args, **kwargs)

    return call


def _bind(
    known: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name; FXP109 for unknown ones, or ones of another type."""
    try:
        given = known.bind(*args, **kwargs).arguments
    except TypeError as fault:
        names = ", ".join(one for one in known.parameters if one != "self")
        raise error(
            "FXP109",
            where=f"{name}()",
            why=f"{fault}. Only the model and the cluster have no name.",
            fix=f"pass the batch as example_inputs=(x, y); the arguments are {names}",
        ) from None
    problems = [
        Problem("FXP109", key, f"it is of type {type(given[key]).__name__}", f"pass {wanted}")
        for key, (kind, wanted) in _ARGUMENT_TYPES.items()
        if given.get(key) is not None and not isinstance(given[key], kind)
    ]
    if problems:
        raise FxpartError(problems)
    return given


_ARGUMENT_TYPES: dict[str, tuple[Any, str]] = {
    "constraints": (Mapping, "a dict of constraints by name"),
    "batch_dims": (Mapping, "a dict of batch dims by input name"),
    "loss": (Callable, "a function of the output and the targets"),
    "seed": (Integral, "an integer"),
}


def _get_precision(given: dict[str, Any]) -> str:
    if "self" in given:
        return str(given["self"].captured.precision)
    plan = given.get("plan")
    wanted = given.get("precision") or (given.get("constraints") or {}).get("precision")
    if wanted is None and plan is not None:
        wanted = (plan if isinstance(plan, Plan) else Plan.load(plan)).precision
    return str(wanted or "fp32")


def _check_tensors(model: nn.Module) -> None:
    """Raise FXP116 for a parameter or buffer created in inference mode: it cannot be trained."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if not is_lazy(tensor) and tensor.is_inference():
                raise error(
                    "FXP116",
                    where=name,
                    why="it was created under torch.inference_mode, so autograd cannot use it",
                    fix="create the model outside torch.inference_mode",
                )


def _warn_about_evaluation_mode(model: nn.Module) -> None:
    """Warn about a model in evaluation mode, as ``from_pretrained`` returns it."""
    if not model.training and any(isinstance(module, _BY_MODE) for module in model.modules()):
        warnings.warn(
            "the model is in evaluation mode and is trained in that mode, without dropout and with "
            "the stored statistics of normalization; call model.train() before it is compiled",
            stacklevel=3,
        )


def describe_process_modes() -> str:
    """Return modes of this process that affect results, as text for comparison; "" for none."""
    found = ""
    if debug := torch.get_deterministic_debug_mode():
        found += f" deterministic {debug}"
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found += f" float32_matmul_precision {precision}"
    if is_flush_denormal_set():
        found += " flush_denormal"
    return found


def is_flush_denormal_set() -> bool:
    """Return whether the calling thread flushes denormal numbers to zero."""
    return _SMALLEST == 0.0
