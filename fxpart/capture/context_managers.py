"""Settings that hold for the capture alone; the model is put back as it was, whatever happens."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import nn

from fxpart.capture.python_state import PythonState, copy_tensors, restore_tensors
from fxpart.capture.source_locations import is_users, shorten_path
from fxpart.compat import disable_mask_detection, is_fake
from fxpart.errors import error

REAL_LIMIT = 200_000_000  # parameters: larger models are not copied, nor run for real


@contextmanager
def prepare_capture(model: nn.Module, training: bool, loss: Any = None) -> Iterator[None]:
    """All of this module together: mode set, cache off, quiet, and the tensors as they were."""
    with ExitStack() as stack:
        stack.enter_context(preserve_tensors(model, loss))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(cache_off(model))
        stack.enter_context(training_mode(model, training))
        stack.enter_context(disable_mask_detection())
        stack.enter_context(tensor_hooks_refused())
        stack.enter_context(quiet())
        yield


@contextmanager
def cache_off(model: nn.Module) -> Iterator[None]:
    """transformers' ``use_cache`` switched off in every configuration of the model.

    Training never needs the cache, and its object cannot leave an exported graph. The whole
    configuration is put back after: a forward may write to it (``problem_type``).
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
    """Each module in the mode of training or of evaluation; its own mode is restored afterwards.

    Training leaves every module in the mode that its owner gave it, as a training loop of torch's
    does: a frozen BatchNorm, or a whole model, may be in evaluation mode.
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
    """The modes, of training or evaluation, of a model's modules when it was captured."""

    def __init__(self, *modules: object) -> None:
        """modules: the model and the loss; what is no module is left out."""
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
        """Which module is in another mode now, as a sentence; "" if none is."""
        now = self._now()
        if now == self._modes:
            return ""
        at = next(at for at, (a, b) in enumerate(zip(now, self._modes, strict=True)) if a != b)
        before, after = _mode(self._modes[at]), _mode(now[at])
        return (
            f"{self._names[at]} is in {after} mode, and was in {before} mode when the program was "
            "compiled"
        )

    def _now(self) -> list[bool]:
        return [module.training for module in self._modules]


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Within: buffers may be written; after: their values are back.

    Needed under fake tensors too: torch runs an op on small real tensors for real. A buffer is
    written only if it changed, for it may overlap itself or be mapped from a file.
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
    """Within: tensors reachable from modules and functions may be written; after: as they were.

    Fake modes run operations with numbers (``n += 1``) for real where all tensors are real. Of
    parameters beyond 2e8 numbers no copy is made: FXP108 where they were written.
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
            why="forward writes parameters in place, and the model is too large to undo that",
            fix="write them in the optimizer, or hold what forward writes in buffers",
        )


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """Tensor.register_hook, called by the user's forward, is FXP108: no tracer keeps the hook."""
    original = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        caller = traceback.extract_stack(limit=2)[0]
        if not is_users(caller.filename):
            return original(self, hook)  # type: ignore[no-untyped-call]
        raise error(
            "FXP108",
            where=f"{shorten_path(caller.filename)}:{caller.lineno}: {caller.line}",
            why="a hook on a tensor's gradient is not in the graph",
            fix="change the gradient in the optimizer, or write the change as an operation",
        )

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """torch's loggers, warnings and stderr silenced: fxpart itself reports failed attempts.

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
