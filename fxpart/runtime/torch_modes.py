"""Modes of torch that are active around a call: whether they can be honored, and what is done.

torch's modes change what a module computes, and many of them belong to one thread. A compiled
program runs in several threads and processes, and its operations are already recorded. So a mode
is honored in all of them, or has no effect in any, or the call is refused before it computes
anything (FXP116). ``MODES`` is the list of those that are checked.

Modes of the whole process act on the stages as on a module: deterministic algorithms and their
debug mode, the precision of float32 products, anomaly detection. Random numbers depend on the
program's seed alone, so that a forked or seeded generator changes nothing.
"""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpart.compat import active_modes, default_device_of, has_modes, has_saved_tensor_hooks
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan

P = ParamSpec("P")
T = TypeVar("T")
_AUTOCAST = {"bf16": torch.bfloat16}
_BY_MODE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
)  # fmt: skip
_SMALLEST = 5e-324  # is equal to zero in a thread that flushes denormal numbers


class TrainerCallKind(enum.Enum):
    """What a call does, on which it depends which modes matter."""

    COMPILE = enum.auto()
    MAKE = enum.auto()  # a trainer
    TRAIN = enum.auto()  # forward and backward
    UPDATE = enum.auto()  # the optimizer's step alone
    EVALUATE = enum.auto()
    STATE = enum.auto()  # copies tensors and computes nothing


_COMPUTES = frozenset(
    {TrainerCallKind.MAKE, TrainerCallKind.TRAIN, TrainerCallKind.UPDATE, TrainerCallKind.EVALUATE}
)


@dataclass(frozen=True)
class TorchModes:
    """The modes that a program was compiled under.

    dtype: torch's default. precision: of the program, "bf16" for autocast in bfloat16. device: type
    of the devices that it runs on. change: says which module of the model is in another mode, of
    training or evaluation, than it was; "" if none is.
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    precision: str = "fp32"
    device: str = "cpu"
    change: Callable[[], str] | None = None

    @property
    def autocast_devices(self) -> tuple[str, ...]:
        """The types of devices whose autocast acts on the program's tensors."""
        return ("cpu",) if self.device == "cpu" else ("cpu", self.device)

    def enter(self, kind: TrainerCallKind, where: str) -> AbstractContextManager[object] | None:
        """What to run a call in, so that it computes as it does without ambient modes.

        None where no mode is active. Raises FXP116 for modes that cannot be honored.
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
        return self._apart(kind)

    def _is_plain(self) -> bool:
        return (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and torch.get_default_dtype() is self.dtype
            and not any(torch.is_autocast_enabled(device) for device in self.autocast_devices)
            and not has_modes()
        )

    def _apart(self, kind: TrainerCallKind) -> ExitStack:
        """Autocast and inference mode switched off, and gradients on unless for evaluation."""
        stack = ExitStack()
        for device in self.autocast_devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if kind is not TrainerCallKind.EVALUATE:
            stack.enter_context(torch.enable_grad())
        return stack


def _autocast(ambient: TorchModes) -> str:
    for device in ambient.autocast_devices:
        if torch.is_autocast_enabled(device):
            active = torch.get_autocast_dtype(device)
            if active is not _AUTOCAST.get(ambient.precision):
                return (
                    f'torch.autocast("{device}", dtype={_short(active)}) is active, and the '
                    f'program has precision="{ambient.precision}"'
                )
    return ""


def _no_gradients(ambient: TorchModes) -> str:
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is active, in which nothing has a gradient"
    return "" if torch.is_grad_enabled() else "torch.no_grad is active: nothing has a gradient"


def _default_dtype(ambient: TorchModes) -> str:
    now = torch.get_default_dtype()
    if now is ambient.dtype:
        return ""
    return (
        f"the default dtype is {_short(now)}, and was {_short(ambient.dtype)} when the program "
        "was compiled"
    )


def _default_device(ambient: TorchModes) -> str:
    for mode in active_modes():
        device = default_device_of(mode)
        if device is not None and device.type != "cpu":
            return f"the default device is {device}"
    return ""


def _users_mode(ambient: TorchModes) -> str:
    for mode in active_modes():
        kind = type(mode)
        if default_device_of(mode) is None and not kind.__module__.startswith("fxpart."):
            return f"the mode {kind.__qualname__} intercepts torch's operations"
    return ""


def _users_mode_at_capture(ambient: TorchModes) -> str:
    fakes = ("FakeTensorMode",)  # of a model that was made under it
    if all(type(mode).__name__ in fakes for mode in active_modes()):
        return ""
    return _users_mode(ambient)


def _saved_tensor_hooks(ambient: TorchModes) -> str:
    return "hooks on saved tensors are active" if has_saved_tensor_hooks() else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TorchMode:
    """A mode that may be active around a call.

    read: why it cannot be honored, "" if it is not active or makes no difference. refused: the
    kinds of calls that are refused then.
    """

    name: str
    read: Callable[[TorchModes], str]
    refused: frozenset[TrainerCallKind]
    fix: str


_LEAVE = "leave it before the call"
_MODULES_FIX = "set the modes with train() and eval() before the program is compiled, or undo this"
MODES = (
    TorchMode(
        "torch.autocast", _autocast, _COMPUTES | {TrainerCallKind.COMPILE},
        'compile with precision="bf16" for autocast in bfloat16, and leave the autocast region',
    ),
    TorchMode(
        "torch.no_grad and torch.inference_mode", _no_gradients,
        frozenset({TrainerCallKind.TRAIN}), _LEAVE,
    ),
    TorchMode(
        "torch.set_default_dtype", _default_dtype, _COMPUTES,
        "compile and train under the same default dtype",
    ),
    TorchMode(
        "torch.set_default_device", _default_device, _COMPUTES | {TrainerCallKind.COMPILE},
        "leave the default device as it is, and give factory functions their device",
    ),
    TorchMode("TorchFunctionMode and TorchDispatchMode", _users_mode, _COMPUTES, _LEAVE),
    TorchMode(
        "TorchFunctionMode and TorchDispatchMode", _users_mode_at_capture,
        frozenset({TrainerCallKind.COMPILE}), _LEAVE,
    ),
    TorchMode(
        "torch.autograd.graph.saved_tensors_hooks", _saved_tensor_hooks,
        frozenset({TrainerCallKind.COMPILE, TrainerCallKind.TRAIN}), _LEAVE,
    ),
)  # fmt: skip


@contextmanager
def disable_torch_modes(ambient: TorchModes, kind: TrainerCallKind, where: str) -> Iterator[None]:
    """Run what is within as without ambient modes; FXP116 for those that cannot be honored."""
    stack = ambient.enter(kind, where)
    if stack is None:
        yield
        return
    with stack:
        yield


def guard_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Check the modes around a function that compiles a model, and run it without them.

    Its arguments ``precision`` and ``plan``, or those of the Program that it is a method of, say
    which autocast the program has.
    """
    known = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = known.bind(*args, **kwargs).arguments
        model = given.get("model")
        if isinstance(model, nn.Module):
            _check_tensors(model)
            _warn_of_evaluation_mode(model)
        ambient = TorchModes(
            precision=_precision(given), device="cuda" if torch.cuda.is_available() else "cpu"
        )
        with disable_torch_modes(ambient, TrainerCallKind.COMPILE, f"fxpart.{function.__name__}"):
            return function(*args, **kwargs)

    return call


def _precision(given: dict[str, Any]) -> str:
    if "self" in given:
        return str(given["self"].captured.precision)
    plan = given.get("plan")
    wanted = given.get("precision") or (given.get("constraints") or {}).get("precision")
    if wanted is None and plan is not None:
        wanted = (plan if isinstance(plan, Plan) else Plan.load(plan)).precision
    return str(wanted or "fp32")


def _check_tensors(model: nn.Module) -> None:
    """FXP116 for a parameter or buffer that was made in inference mode: it cannot be trained."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if not is_lazy(tensor) and tensor.is_inference():
                raise error(
                    "FXP116",
                    where=name,
                    why="it was created under torch.inference_mode, so that autograd refuses it",
                    fix="create the model outside of torch.inference_mode",
                )


def _warn_of_evaluation_mode(model: nn.Module) -> None:
    """One warning for a model that trains in evaluation mode, as ``from_pretrained`` returns it."""
    if not model.training and any(isinstance(module, _BY_MODE) for module in model.modules()):
        warnings.warn(
            "the model is in evaluation mode and is trained in it, without dropout and with the "
            "stored statistics of normalization; call model.train() before it is compiled",
            stacklevel=3,
        )


def describe_process_modes() -> str:
    """Modes of this process that act on results, as text for ranks to compare; "" for none."""
    found = ""
    if debug := torch.get_deterministic_debug_mode():
        found += f" deterministic {debug}"
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found += f" float32_matmul_precision {precision}"
    if is_flush_denormal_set():
        found += " flush_denormal"
    return found


def is_flush_denormal_set() -> bool:
    """Whether the calling thread flushes denormal numbers to zero."""
    return _SMALLEST == 0.0
