"""Temporary settings for capture; the model is restored in all cases."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from fxpart.capture.python_state import PythonState, copy_tensors, restore_tensors
from fxpart.capture.source_locations import is_users, shorten_path
from fxpart.compat import disable_mask_detection, is_fake
from fxpart.errors import error

REAL_LIMIT = 200_000_000  # parameters; larger models are neither copied nor run on real data


@contextmanager
def prepare_capture(model: nn.Module, training: bool, loss: Any = None) -> Iterator[None]:
    """Apply all contexts of this module: mode, cache, logging, and preserved tensors."""
    with ExitStack() as stack:
        stack.enter_context(preserve_tensors(model, loss))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(cache_off(model))
        stack.enter_context(training_mode(model, training))
        stack.enter_context(disable_mask_detection())
        stack.enter_context(tensor_hooks_refused())
        stack.enter_context(reentrant_checkpoints_recorded())
        stack.enter_context(cumulative_averages_recorded())
        stack.enter_context(value_checks_left_out())
        stack.enter_context(counts_of_fixed_size())
        stack.enter_context(quiet())
        yield


@contextmanager
def cache_off(model: nn.Module) -> Iterator[None]:
    """Switch off transformers' ``use_cache`` in every configuration of the model.

    Training never needs the cache, and its object cannot be returned from an exported graph. The
    whole configuration is restored, since forward may write to it (``problem_type``).
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [
        (config, dict(vars(config))) for config in configs.values() if hasattr(config, "__dict__")
    ]
    for config, _ in before:
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    try:
        yield
    finally:
        for config, attributes in before:
            vars(config).clear()
            vars(config).update(attributes)


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode for training or evaluation, and restore each module's mode afterwards.

    Training keeps the mode that the user set on each module, like a torch training loop does: a
    frozen BatchNorm, or a whole model, may be in evaluation mode.
    """
    before = {module: module.training for module in model.modules()}
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


class ModuleModes:
    """The modes, training or evaluation, of a model's modules at capture."""

    def __init__(self, *modules: object) -> None:
        """modules: the model and the loss; other objects are ignored."""
        found = {
            module: f"{type(root).__name__}{'.' if name else ''}{name}"
            for root in modules
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        }
        self._names = list(found.values())
        self._modules = list(found)
        self._modes = self._now()

    def __call__(self) -> str:
        """Describe a module whose mode has changed; "" if there is none."""
        now = self._now()
        if now == self._modes:
            return ""
        at = next(at for at, (a, b) in enumerate(zip(now, self._modes, strict=True)) if a != b)
        before, after = _mode(self._modes[at]), _mode(now[at])
        return (
            f"{self._names[at]} is in {after} mode, but was in {before} mode when the program was "
            "compiled"
        )

    def _now(self) -> list[bool]:
        return [module.training for module in self._modules]


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers that are written in this context.

    This is also needed under fake tensors, since torch runs some ops on small real tensors. A
    buffer is written only if it changed, because it may overlap itself or be mapped from a file.
    """
    before = [(b, b.clone()) for b in module.buffers() if not is_fake(b)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def preserve_tensors(*roots: Any) -> Iterator[None]:
    """Restore tensors reachable from modules and functions that are written in this context.

    Fake modes run operations with numbers (``n += 1``) on real tensors if all tensors are real.
    Parameters beyond 2e8 elements are not copied: raise FXP108 if they were written.
    """
    tensors = PythonState.of(*roots).tensors
    owned = [t for t in tensors if isinstance(t, nn.Parameter)]
    large = owned if sum(p.numel() for p in owned) > REAL_LIMIT else []
    left_out = {id(p) for p in large}
    before = copy_tensors(t for t in tensors if id(t) not in left_out)
    versions = [p._version for p in large]
    try:
        yield
    finally:
        restore_tensors(before)
    if versions != [p._version for p in large]:
        raise error(
            "FXP108",
            where=type(roots[0]).__name__,
            why="forward writes parameters in place, but the model is too large to restore them",
            fix="update parameters in the optimizer, or use buffers for values that forward writes",
        )


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """Raise FXP108 if the user's forward calls Tensor.register_hook, which no tracer keeps."""
    original = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        caller = traceback.extract_stack(limit=2)[0]
        if not is_users(caller.filename):
            return original(self, hook)  # type: ignore[no-untyped-call]
        raise error(
            "FXP108",
            where=f"{shorten_path(caller.filename)}:{caller.lineno}: {caller.line}",
            why="a hook on a tensor's gradient is not in the graph",
            fix="change the gradient in the optimizer, or express the change as an operation",
        )

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


@contextmanager
def reentrant_checkpoints_recorded() -> Iterator[None]:
    """Record what torch.utils.checkpoint(use_reentrant=True) computes as plain operations.

    Its forward runs without gradients, which a tracer would keep for the program. As in a run,
    nothing inside is trained if no argument needs a gradient.
    """

    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        tracked = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(tracked and torch.is_grad_enabled()):
            return function(*args)

    original = CheckpointFunction.apply
    CheckpointFunction.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.apply = original  # type: ignore[method-assign]


@contextmanager
def cumulative_averages_recorded() -> Iterator[None]:
    """Record statistics of BatchNorm(momentum=None) with their count as a tensor, not a number."""
    original = _BatchNorm.forward

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        averages = [a for a in (self.running_mean, self.running_var) if a is not None]
        count = self.num_batches_tracked
        counts = self.training and self.track_running_stats and self.momentum is None
        if not counts or count is None or len(averages) != 2:
            return original(self, input)
        self._check_input_dim(input)
        count.add_(1)
        dims = [d for d in range(input.dim()) if d != 1]
        var, mean = torch.var_mean(input.detach(), dims)
        for average, batch in zip(averages, (mean, var), strict=True):
            average.copy_(average + (batch - average) / count)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]


class _TorchWithoutAny:
    """torch, for a function that asks ``torch.any`` whether values are wrong: none are."""

    any = staticmethod(lambda *_: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def value_checks_left_out() -> Iterator[None]:
    """Leave out torch's own checks of values: an error that depends on data is not in a graph.

    These are the arguments of torch.distributions, unless the user turned their validation on for
    one distribution, and the variance of gaussian_nll_loss.
    """
    validates, original = Distribution._validate_args, F.gaussian_nll_loss
    names = {**original.__globals__, "torch": _TorchWithoutAny()}
    unchecked = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    names[original.__name__] = unchecked  # which it calls again under function modes
    Distribution.set_default_validate_args(False)
    F.gaussian_nll_loss = unchecked
    try:
        yield
    finally:
        Distribution._validate_args, F.gaussian_nll_loss = validates, original


def _count(
    input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Return bincount(minlength=n) of values below n; others raise an error at run time."""
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    counts = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return counts.index_add(0, input.long(), weights.detach())


@contextmanager
def counts_of_fixed_size() -> Iterator[None]:
    """Record torch.bincount with ``minlength`` as a result of that size, which needs no data."""
    original = torch.bincount

    def bincount(
        input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        fixed = minlength and isinstance(input, torch.Tensor) and input.dim() == 1
        return (_count if fixed else original)(input, weights, minlength)

    torch.bincount = bincount  # type: ignore[assignment]
    torch.Tensor.bincount = bincount  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.bincount = original
        del torch.Tensor.bincount


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's loggers, warnings and stderr; fxpart itself reports failed attempts.

    torch.export prints the graph so far to stderr when a guard fails.
    """
    logger = logging.getLogger("torch")
    names = [n for n in logging.root.manager.loggerDict if n == "torch" or n.startswith("torch.")]
    loggers = [logger, *(logging.getLogger(n) for n in names)]
    before = [(one, one.disabled) for one in loggers]
    for one in loggers:
        one.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, disabled in before:
            one.disabled = disabled
