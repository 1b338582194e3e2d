"""One optimizer interface over the per-stage optimizers of an asynchronous trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fxpart.compat import get_write_count, mark_stepped
from fxpart.errors import FxpartError, error
from fxpart.runtime.optimizer.facade import OptimizerFacade
from fxpart.runtime.optimizer.update_options import copy_options, set_options


class StageOptimizerFacade(OptimizerFacade):
    """Parameter groups whose options apply to every stage from the next minibatch on.

    Options set here, or in the user's instance, are recorded when a minibatch is submitted
    (:class:`~fxpart.runtime.optimizer.update_options.UpdateOptions`). Parameters can be read and
    written only while no minibatch is in flight. Step hooks run once per update, with the optimizer
    of this process's first stage.
    """

    def reload(self, *, user: bool = True) -> None:
        """Copy the options of the stage optimizers here. user: copy them to the user's instance
        too.
        """
        options = copy_options(self._optimizers[0])
        set_options(self._groups, options)
        if user and self._user is not None:
            set_options(self._user.param_groups, options)
            self._user_seen = copy_options(self._user)

    def submitted(self) -> None:
        """Mark the optimizer as stepped, so that learning-rate schedulers do not warn."""
        mark_stepped(self)
        if self._user is not None:
            mark_stepped(self._user)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        """Call a read-only hook before each update of this process's first stage."""
        return self._optimizers[0].register_step_pre_hook(_make_read_only_hook(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        """Call a read-only hook after each update of this process's first stage."""
        return self._optimizers[0].register_step_post_hook(_make_read_only_hook(hook))

    def _touch(self) -> None:
        """Raise FXP115 if minibatches are in flight when parameters are read."""
        super()._touch()
        self._get_owner().touch()


def _make_read_only_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook to raise FXP115 if it changes a weight or a gradient: it sees one stage only."""

    def call_hook(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        before = _versions(optimizer)
        result = hook(optimizer, *arguments)
        if _versions(optimizer) != before:
            why = "a step hook changed weights or gradients, but it is called for one stage only"
            fix = "use a parameter hook (register_hook), clip_norm= or clip_value="
            raise _make_error("step hook", why, fix)
        return result

    return call_hook


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            g = p.grad
            result.append(
                (get_write_count(p), 0, 0)
                if g is None
                else (get_write_count(p), id(g), get_write_count(g))
            )
    return result


def in_flight_error() -> FxpartError:
    """Return the error for reading parameters while minibatches are in flight."""
    why = "minibatches are in flight, so stages have weights of different updates"
    return _make_error('param_groups["params"]', why, "call `trainer.drain()` on every rank first")


def _make_error(what: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"trainer.optimizer, {what}", why=why, fix=fix)
