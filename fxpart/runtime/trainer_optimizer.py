"""The optimizer that an asynchronous trainer shows: one for the optimizers of its stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from fxpart.compat import writes
from fxpart.errors import FxpartError, error

_FIX = "leave the call out: trainer.step(batch) updates every stage"


class TrainerGroup(dict[str, Any]):
    """One parameter group; touch: called when its parameters are read, raises where none may be.

    While minibatches are in flight each stage has weights of another update: nobody can read the
    weights of the model, and what is written to them would not be what plain PyTorch has then.
    """

    def __init__(self, group: dict[str, Any], touch: Callable[[], None]) -> None:
        """group: what it begins with."""
        super().__init__(group)
        self._touch = touch

    def __getitem__(self, key: str) -> Any:
        """An option, or the parameters."""
        if key == "params":
            self._touch()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As ``group[key]``."""
        return self[key] if key in self else default


class TrainerOptimizer(torch.optim.Optimizer):
    """Parameter groups whose options count for every stage from the next minibatch on.

    A learning-rate scheduler of torch, or the user, changes ``param_groups`` between two calls of
    ``trainer.step``. The groups' parameters are those that this process updates, to be read and
    written while nothing is in flight; the state is that of the stages' optimizers. Step hooks are
    called once for each update, with the optimizer of this process's first stage. What would make
    other updates than the stages do is refused, FXP115.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        """optimizers: of the stages of this process, with equal groups. touch: see TrainerGroup."""
        self._each = list(optimizers)
        self._complete = False
        first = self._each[0]
        groups = [
            {k: _copy(v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in first.param_groups
        ]
        for index, group in enumerate(groups):
            group["params"] = [p for o in self._each for p in o.param_groups[index]["params"]]
        super().__init__(groups, dict(first.defaults))
        self.param_groups = [TrainerGroup(group, touch) for group in self.param_groups]
        self._complete = True

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of every parameter of this process, as it is now."""
        found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for each in self._each:
            found |= each.state
        return found

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        """Torch sets an empty one when the optimizer is made."""

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Refused, FXP115: each stage updates by itself."""
        why = "each stage updates its weights by itself, as soon as its gradients are complete"
        raise _refused("step()", why, _FIX)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to do: each stage drops its gradients with its own update."""

    def state_dict(self) -> NoReturn:
        """Refused, FXP115: other processes have parts of it, and updates may be under way."""
        why = "stages of other processes have parts of it, and updates may be under way"
        raise _refused("state_dict()", why, "trainer.optimizer_state_dict()")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refused, FXP115: as :meth:`state_dict`."""
        why = "stages of other processes have parts of it, and updates may be under way"
        raise _refused("load_state_dict()", why, "trainer.load_optimizer_state_dict(state)")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, FXP115, once the trainer is made."""
        if self._complete:
            why = "the optimizers of the stages are made"
            raise _refused("add_param_group()", why, "program.trainer(optimizer, groups=...)")
        super().add_param_group(param_group)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call it before each update of this process's first stage; it may only look."""
        return self._each[0].register_step_pre_hook(_looking(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call it after each update of this process's first stage; it may only look."""
        return self._each[0].register_step_post_hook(_looking(hook))


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
            found.append((writes(p), 0, 0) if g is None else (writes(p), id(g), writes(g)))
    return found


def flying() -> FxpartError:
    """Parameters were read while minibatches are in flight."""
    why = "minibatches are in flight, and each stage has weights of another update"
    return _refused('param_groups["params"]', why, "trainer.drain() first, on every rank")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _refused(what: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"trainer.optimizer.{what}", why=why, fix=fix)
