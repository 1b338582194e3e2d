"""The optimizer that an asynchronous trainer shows: one for the optimizers of its stages."""

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
    """Parameter groups whose options count for every stage from the next minibatch on.

    What is set here, or in the user's instance, is recorded when a minibatch is submitted
    (:class:`~fxpart.runtime.optimizer.update_options.UpdateOptions`). Parameters are to be read and
    written while nothing is in flight. Step hooks are called once for each update, with the
    optimizer of this process's first stage.
    """

    def reload(self, *, user: bool = True) -> None:
        """Show the options that the stages' optimizers have. user: set them in the instance too."""
        options = copy_options(self._optimizers[0])
        set_options(self._groups, options)
        if user and self._user is not None:
            set_options(self._user.param_groups, options)
            self._user_seen = copy_options(self._user)

    def submitted(self) -> None:
        """An update is on its way: schedulers need not miss it."""
        mark_stepped(self)
        if self._user is not None:
            mark_stepped(self._user)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        """Call it before each update of this process's first stage; it may only look."""
        return self._optimizers[0].register_step_pre_hook(_looking(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:  # type: ignore[override]
        """Call it after each update of this process's first stage; it may only look."""
        return self._optimizers[0].register_step_post_hook(_looking(hook))

    def _touch(self) -> None:
        """Parameters are read: FXP115 while minibatches are in flight."""
        super()._touch()
        trainer: Any = self._get_trainer()
        trainer.touch()


def _looking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook; FXP115 if it changes a weight or a gradient, of which it sees one stage's alone."""

    def looking(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        before = _versions(optimizer)
        found = hook(optimizer, *arguments)
        if _versions(optimizer) != before:
            why = "a step hook changed weights or gradients, and it is called for one stage alone"
            fix = "a hook of the parameters (register_hook); or clip_norm= or clip_value="
            raise _refused("step hook", why, fix)
        return found

    return looking


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            g = p.grad
            found.append(
                (get_write_count(p), 0, 0)
                if g is None
                else (get_write_count(p), id(g), get_write_count(g))
            )
    return found


def in_flight_error() -> FxpartError:
    """Parameters were read while minibatches are in flight."""
    why = "minibatches are in flight, and each stage has weights of another update"
    return _refused('param_groups["params"]', why, "trainer.drain() first, on every rank")


def _refused(what: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"trainer.optimizer, {what}", why=why, fix=fix)
