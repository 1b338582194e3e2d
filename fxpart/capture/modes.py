"""Settings of the model that hold for the capture alone and are put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def cache_off(model: nn.Module) -> Iterator[None]:
    """transformers' ``use_cache`` switched off in every configuration of the model, then restored.

    Training never needs the cache, and its object cannot leave an exported graph.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    changed = [c for c in configs.values() if getattr(c, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, each submodule's own mode restored afterwards.

    A model that is in training mode already keeps submodules that its owner put into evaluation
    mode (frozen BatchNorm).
    """
    before = {module: module.training for module in model.modules()}
    if model.training != training or not training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
