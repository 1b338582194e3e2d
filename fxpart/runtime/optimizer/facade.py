"""The optimizer that a trainer exposes: options and parameters of this process.

The optimizers that update the weights belong to ranks or stages, and own shards of parameters under
ZeRO. What a user or a scheduler sets here, or in the instance that the user passed, reaches all of
them before the next update. The parameters are the stages' own tensors, whose shards are views, so
writing to them takes effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch

from fxpart.compat import mark_stepped, replace_step
from fxpart.errors import FxpartError, error
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer

_NO_OPTIONS = ("params", "param_names")


class FacadeOwner(Protocol):
    """The pipeline of a trainer, as far as the facade calls it."""

    def step_by_hand(self) -> None:
        """Update with the current gradients; FXP115 if that is impossible."""

    def zero_grad(self) -> None:
        """Clear all gradients."""

    def touch(self) -> None:
        """Note that parameters are accessed; FXP115 in flight."""


class FacadeParameters(list[torch.Tensor]):
    """The parameters of a group; touch: called at each access, raises if access is forbidden."""

    def __init__(self, tensors: Iterable[torch.Tensor], touch: Callable[[], None]) -> None:
        """Create the list."""
        super().__init__(tensors)
        self.touch = touch

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Report the access."""
        self.touch()
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        """Report the access."""
        self.touch()
        return super().__getitem__(key)

    def __len__(self) -> int:
        """Report the access."""
        self.touch()
        return super().__len__()


class FacadeGroup(dict[str, Any]):
    """A parameter group: options, and ``params`` as :class:`FacadeParameters`."""

    def __getitem__(self, key: str) -> Any:
        """Report access to parameters, because C functions bypass the list's methods."""
        found = super().__getitem__(key)
        if key == "params":
            found.touch()
        return found


class OptimizerFacade(torch.optim.Optimizer):
    """One optimizer that represents all of this process, for users and learning-rate schedulers.

    changed: options set since the ranks last compared them, as text. touched: whether the
    parameters were accessed, and may have been written. closed: whether the trainer is closed,
    which releases the user's instance.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        members: Sequence[Sequence[torch.Tensor]],
        user: UserOptimizer | None,
        *,
        withheld: str = "",
        final: bool = False,
    ) -> None:
        """optimizers: of this process, with equal groups. members: each group's parameters.

        user: the user's instance, whose options count too. withheld: why the parameters must not be
        accessed, "" if they may. final: gradients after a backward are already reduced over ranks.
        """
        self._owner: Callable[[], FacadeOwner | None] = lambda: None
        self._optimizers = tuple(optimizers)
        self._withheld, self._final = withheld, final
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        self.changed, self.touched, self.closed = "", False, False
        self._groups = [
            FacadeGroup(
                _options(group), params=FacadeParameters(() if withheld else mine, self._touch)
            )
            for group, mine in zip(optimizers[0].param_groups, members, strict=True)
        ]
        self._seen = [_options(group) for group in self._groups]
        self._user = None if user is None else user.instance
        self._sizes = self._user_sizes()
        self._user_seen = [
            _options(g) for g in ([] if user is None else user.instance.param_groups)
        ]
        replace_step(self, OptimizerFacade._step)
        if user is not None and user.followed:
            _redirect_calls(user.instance, self)

    def attach(self, owner: FacadeOwner) -> None:
        """Forward calls to the pipeline of the trainer."""
        self._owner = weakref.ref(owner)

    def __repr__(self) -> str:
        """Return the class of the optimizer, and the options of each group."""
        kind = type(self._optimizers[0]).__name__
        return f"{kind} of a trainer {list(map(_options, self._groups))}"

    @property
    def param_groups(self) -> list[FacadeGroup]:  # type: ignore[override]
        """The groups, including options set in the user's instance."""
        self._read_user_options()
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by tensor; under ZeRO the tensors are shards of parameters."""
        if len(self._optimizers) == 1:
            return self._optimizers[0].state
        return {p: kept for each in self._optimizers for p, kept in each.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the optimizer's class."""
        return self._optimizers[0].defaults

    def apply(self) -> None:
        """Set options from here or from the user's instance in every optimizer."""
        self._read_user_options()
        for index, (group, seen) in enumerate(zip(self._groups, self._seen, strict=True)):
            found = _find_changes(group, seen)
            if not found:
                continue
            for optimizer in self._optimizers:
                _set(optimizer.param_groups[index], found)
            seen.update(_options(found))
            plain = {key: _convert_to_plain(value) for key, value in found.items()}
            self.changed += f" group {index} {plain}"

    def stepped(self) -> None:
        """After an update, show the options that the optimizer has set itself."""
        own = self._optimizers[0].param_groups
        for group, mine, seen in zip(self._groups, own, self._seen, strict=True):
            if found := _find_changes(mine, seen):
                _set(group, found)
                seen.update(_options(found))
        mark_stepped(self)
        if self._user is not None:
            mark_stepped(self._user)

    def reload(self) -> None:
        """After a load, show the optimizers' options, also in the user's instance."""
        for group, mine in zip(self._groups, self._optimizers[0].param_groups, strict=True):
            _set(group, _find_changes(mine, group))
        self._seen = [_options(group) for group in self._groups]
        theirs = [] if self._user is None else self._user.param_groups
        for group, known in zip(self._groups, theirs, strict=False):
            _set(known, _find_changes(group, known))
        self._user_seen = [_options(group) for group in theirs]

    def is_of(self, optimizer: object) -> bool:
        """Return whether an optimizer is this one or the user's instance."""
        return optimizer is self or (self._user is not None and optimizer is self._user)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._get_owner().zero_grad()

    def _step(self, closure: Callable[[], float] | None = None) -> None:
        """Update with the gradients of :meth:`~fxpart.runtime.trainer.Trainer.backward`."""
        if closure is not None:
            fix = "call step() without arguments"
            raise _make_error("step(closure)", "a trainer computes the loss itself", fix)
        self._get_owner().step_by_hand()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise FXP115."""
        raise _make_error(
            "add_param_group()", "the parameters of each group are already divided between ranks",
            "add all groups before the trainer is created",
        )  # fmt: skip

    def state_dict(self) -> NoReturn:
        """Raise FXP115: the state would be that of this process alone."""
        raise _make_error(
            "state_dict()", "this process has only a part of the state",
            "use trainer.optimizer_state_dict() or trainer.save_checkpoint()",
        )  # fmt: skip

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise FXP115."""
        raise _make_error(
            "load_state_dict()", "this process has only a part of the state",
            "use trainer.load_optimizer_state_dict() or trainer.load_checkpoint()",
        )  # fmt: skip

    def _reject_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise _make_error(
            "hooks of the optimizer's step", "each rank steps only its own parameters",
            "use a callback of fit, or call your function around trainer.step()",
        )  # fmt: skip

    register_step_pre_hook = register_step_post_hook = _reject_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _reject_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _reject_hook

    # -- internals --------------------------------------------------------------------------------

    def _read_user_options(self) -> None:
        """Read options set in the user's instance."""
        if self._user is None:
            return
        if self._user_sizes() != self._sizes:
            self.add_param_group({})
        groups = self._user.param_groups
        for group, theirs, seen in zip(self._groups, groups, self._user_seen, strict=True):
            found = _find_changes(theirs, seen)
            if found:
                _set(group, found)
                seen.update(_options(found))

    def _user_sizes(self) -> list[int]:
        groups = [] if self._user is None else self._user.param_groups
        return [len(group["params"]) for group in groups]

    def _get_owner(self) -> FacadeOwner:
        owner = self._owner()
        if owner is None or self.closed:
            raise _make_error("a call", "its trainer is closed", "create another trainer")
        return owner

    def _touch(self) -> None:
        if self._withheld:
            fix = "change trainer.state_dict(), and pass it to trainer.load_state_dict()"
            raise _make_error('param_groups["params"]', self._withheld, fix)
        if not self.touched:
            self.touched = True
            self.note_gradients()

    def note_gradients(self) -> None:
        """Record the current gradients, to detect later writes to them."""
        if self.touched and not self._final:
            self._gradients = [
                (p, p.grad, -1 if p.grad is None else p.grad._version)
                for group in self._groups
                for p in list.__iter__(dict.__getitem__(group, "params"))
            ]

    def check_gradients(self) -> None:
        """Raise FXP115 if gradients were changed before the ranks have reduced them."""
        for p, gradient, version in self._gradients:
            now = p.grad
            if now is not gradient or (now is not None and now._version != version):
                raise _make_error(
                    "gradients", "they were changed before the ranks have reduced them",
                    "use clip_norm= or clip_value= of trainer(), or a smaller learning rate",
                )  # fmt: skip


def find_scheduled_optimizers(scheduler: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a scheduler and of schedulers inside it."""
    found: list[torch.optim.Optimizer] = []
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        several = value if isinstance(value, (list, tuple)) else [value]
        for one in several:
            if isinstance(one, torch.optim.Optimizer):
                found.append(one)
            elif one is not scheduler and hasattr(one, "step") and hasattr(one, "optimizer"):
                found += find_scheduled_optimizers(one)
    return found


def check_scheduler(scheduler: object, optimizer: OptimizerFacade | None) -> None:
    """Raise FXP115 if a scheduler belongs to another optimizer than the trainer's."""
    name = type(scheduler).__name__
    if optimizer is None or not all(map(optimizer.is_of, find_scheduled_optimizers(scheduler))):
        raise error(
            "FXP115",
            where=f"scheduler {name}",
            why="it sets the options of another optimizer than the trainer's",
            fix=f"create {name} with trainer.optimizer, or with the instance that was passed to "
            "compile() or trainer()",
        )


def _redirect_calls(instance: torch.optim.Optimizer, facade: OptimizerFacade) -> None:
    """Redirect calls of the user's instance to the facade while its trainer is open."""
    found = weakref.ref(facade)

    def follows(name: str) -> Callable[..., Any]:
        def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            live = found()
            if live is None or live.closed or live._owner() is None:
                return getattr(type(self), name)(self, *args, **kwargs)
            return getattr(live, name)(*args, **kwargs)

        call.of_trainer = True  # type: ignore[attr-defined]
        return call

    replace_step(instance, follows("step"))
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(instance, name, MethodType(follows(name), instance))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, with tensors copied."""
    return {k: _copy(v) for k, v in group.items() if k not in _NO_OPTIONS}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _find_changes(group: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from ``seen``."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key in _NO_OPTIONS:
            continue
        known = seen.get(key, _NO_OPTIONS)
        if value is known or (type(value) is type(known) and _equal(value, known)):
            continue
        found[key] = value
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other.to(one.device)))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(
            type(a) is type(b) and _equal(a, b) for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


def _set(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options; write into existing tensors of the same shape."""
    for key, value in options.items():
        current = dict.get(group, key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            if current.shape == value.shape:
                current.copy_(value)
                continue
        group[key] = _copy(value)


def _convert_to_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _make_error(where: str, why: str, fix: str) -> FxpartError:
    return error("FXP115", where=f"trainer.optimizer, {where}", why=why, fix=fix)
