"""What the user requests of a run, compared with what it began with when it is resumed.

A checkpoint restores options of the optimizer, the seed and the scheduler. A request that differs
from that of the checkpoint is applied where the run can continue with it, and reported; it is
rejected otherwise. Nothing is ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from fxpart.errors import FxpartError, Problem

if TYPE_CHECKING:
    from fxpart.runtime.fit import FitLoop

_PLAIN = (bool, int, float, str, type(None))
# Attributes of schedulers that change while they run.
_PROGRESS = frozenset(
    ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "total_epoch")
)
# Options of trainers that concern speed, or are compared elsewhere.
_FREE = frozenset(
    ("seed", "schedule", "recompute", "compile_stages", "pin", "gather_ahead", "cuda_graphs",
     "offload", "log_grad_norm")
)  # fmt: skip
Options = dict[str, Any]


def describe_request(fit: FitLoop) -> Options:
    """Return the request as JSON values, before anything is restored."""
    trainer, options = fit.trainer, fit.trainer.options
    update_options = trainer.pipeline.update_options
    scheduler = fit.scheduler or (None if update_options is None else update_options.scheduler)
    found: Options = {
        "seed": trainer.seed,
        "groups": [] if trainer.optimizer is None else list(map(_plain, _groups(fit))),
        "scheduler": {} if scheduler is None else describe_scheduler(scheduler),
    }
    own = {field.name: getattr(options, field.name) for field in fields(options)}
    found["options"] = _plain({name: v for name, v in own.items() if name not in _FREE})
    found["options"]["accumulate"] = fit.run.accumulate
    return found


def apply_request(fit: FitLoop, asked: Options, before: Any) -> None:
    """Apply what differs from the request of the restored checkpoint, and report it.

    before: the checkpoint's, or None. Every rank calls it. Raises FXP109 for a seed or a scheduler
    with other settings, and for another learning rate under a scheduler.
    """
    if not isinstance(before, Mapping):
        return
    problems = [*_find_seed(fit, asked, before), *_find_scheduler(asked, before)]
    changes: list[str] = []
    old_groups = before.get("groups", [])
    for index, (now, old) in enumerate(zip(asked["groups"], old_groups, strict=False)):
        group = fit.trainer.optimizer.param_groups[index]  # type: ignore[union-attr]
        for name, value in now.items():
            if name not in old or old[name] == value or _equals(group.get(name), value):
                continue
            text = f"{name} {_show(value)} instead of {_show(old[name])}"
            if name == "lr" and asked["scheduler"]:
                problems.append(_make_problem(
                    text, "its scheduler continues from the learning rate that the run began with",
                ))  # fmt: skip
                continue
            group[name] = tuple(value) if isinstance(value, list) else value
            changes.append(f"{text} in parameter group {index}" if len(old_groups) > 1 else text)
    if problems:
        raise FxpartError(problems)
    for name, value in asked["options"].items():
        old = before.get("options", {})
        if name in old and old[name] != value:
            changes.append(f"{name} {_show(value)} instead of {_show(old[name])}")
    if changes and 0 in fit.transport.local:
        warnings.warn(
            f"the run continues after step {fit.step} with {', '.join(changes)}", stacklevel=5
        )


def _groups(fit: FitLoop) -> list[Options]:
    """Return the options of each parameter group, without the effect of a scheduler."""
    found = []
    for group in fit.trainer.optimizer.param_groups:  # type: ignore[union-attr]
        own = {name: value for name, value in dict(group).items() if name != "params"}
        first = own.pop("initial_lr", None)
        found.append({**own, "lr": first} if first is not None and "lr" in own else own)
    return found


def describe_scheduler(scheduler: Any) -> Options:
    """Return the class and the settings of a scheduler as JSON values."""
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    settings = {
        name: value
        for name, value in state.items()
        if name not in _PROGRESS and not name.startswith("_")
    }
    return {"class": type(scheduler).__name__, **_plain(settings)}


def _find_seed(fit: FitLoop, asked: Options, before: Mapping[str, Any]) -> list[Problem]:
    old = before.get("seed", asked["seed"])
    if old == asked["seed"]:
        return []
    return [_make_problem(
        f"seed {asked['seed']} instead of {old}", "another seed changes its random numbers",
    )]  # fmt: skip


def _find_scheduler(asked: Options, before: Mapping[str, Any]) -> list[Problem]:
    now, old = asked["scheduler"], before.get("scheduler", asked["scheduler"])
    if now.get("class") != old.get("class"):
        text = f"scheduler {now.get('class', 'none')} instead of {old.get('class', 'none')}"
        return [_make_problem(text, "its state belongs to the scheduler that it began with")]
    return [
        _make_problem(
            f"scheduler {name} {_show(now[name])} instead of {_show(old[name])}",
            "the scheduler continues with the settings that the run began with",
        )
        for name in now
        if name in old and now[name] != old[name]
    ]


def _make_problem(what: str, why: str) -> Problem:
    return Problem(
        "FXP109", f"resumed run, {what}", f"the run cannot continue with it: {why}",
        "use what the run began with, or start a run in another folder",
    )  # fmt: skip


def _plain(given: Mapping[str, Any]) -> Options:
    """Return the entries that JSON can represent; tuples as lists."""
    found: Options = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            value = value.item() if value.ndim == 0 else value
        if isinstance(value, _PLAIN):
            found[name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            found[name] = list(value)
    return found


def _equals(current: Any, value: Any) -> bool:
    plain = _plain({"": current})
    return "" in plain and bool(plain[""] == value)


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
