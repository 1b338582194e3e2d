"""The options of a trainer, which must be equal on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

import torch

from fxpart.accelerator import is_accelerator
from fxpart.errors import error
from fxpart.runtime.executor.recompute import Mode
from fxpart.schedule.action import Schedule
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.text import to_text


def check_accumulate(accumulate: object) -> None:
    """Raise FXP105 where a second part of the batch was passed instead of a flag."""
    if not isinstance(accumulate, bool):
        raise error(
            "FXP105",
            where="step(batch, accumulate)",
            why=f"the second argument is a {type(accumulate).__name__}; a batch is one argument",
            fix="pass inputs and targets together: step((x, y))",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The keyword arguments of :class:`~fxpart.runtime.trainer.Trainer` that are plain data.

    microbatches: number of microbatches of a batch (fewer if it has fewer rows). schedule: a name,
    or computations for stages on these ranks (or on others that share stages in the same way).
    clip_norm: maximum global gradient norm. clip_value: maximum absolute value of gradient
    elements; at most one of the two. log_grad_norm: compute the global norm at every update, also
    without clipping. seed: of random ops, by default the program's. recompute: activation
    recomputation ("none", "selective", "full"), of all stages or by stage: see
    :mod:`fxpart.runtime.executor.recompute`. compile_stages: a backend of torch.compile for each
    stage, or whether to use inductor: see :mod:`fxpart.runtime.executor.torch_compile`. pin: bind
    each local rank to its own cores, or "auto" if that is useful: see
    :mod:`fxpart.runtime.host.cpu_affinity`. gather_ahead: for how many blocks ZeRO-3 gathers
    parameters before their use; by default one on accelerators, and none on CPUs. cuda_graphs:
    record the kernels of each stage and replay them: see
    :mod:`fxpart.runtime.executor.cuda_graphs`. ema: the decay of an exponential moving average of
    the weights, such as 0.999, that every update continues: see
    :mod:`fxpart.runtime.optimizer.weight_average`.
    """

    microbatches: int
    schedule: str | Schedule = DEFAULT_SCHEDULE
    clip_norm: float | None = None
    clip_value: float | None = None
    log_grad_norm: bool = False
    seed: int | None = None
    recompute: str | Mapping[int, str] = "none"
    compile_stages: bool | str = False
    pin: bool | str = False
    gather_ahead: int | None = None
    cuda_graphs: bool = False
    ema: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """Build from keyword arguments; FXP109 for unknown options and invalid values."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                fix = f"use one of {', '.join(known)}"
                raise _make_error(name, "there is no such option", fix)
        made = cls(**given)
        for name in ("clip_norm", "clip_value"):
            largest = getattr(made, name)
            if largest is not None and not largest > 0:
                raise _make_error(f"{name}={largest}", "it is not positive", "leave it out")
        if made.clip_norm is not None and made.clip_value is not None:
            raise _make_error("clip_norm, clip_value", "both are given", "pass only one of them")
        if made.gather_ahead is not None and made.gather_ahead < 0:
            where = f"gather_ahead={made.gather_ahead}"
            raise _make_error(where, "it is negative", "use 0 to gather parameters at their use")
        if made.ema is not None and not 0.0 <= made.ema < 1.0:
            where = f"ema={made.ema}"
            raise _make_error(where, "a decay is at least 0 and less than 1", "use 0.999")
        made.recomputes(0)
        return made

    def blocks_ahead(self, device: torch.device) -> int:
        """Return for how many blocks parameters are gathered ahead on a device."""
        return int(is_accelerator(device)) if self.gather_ahead is None else self.gather_ahead

    def recomputes(self, stages: int) -> dict[int, Mode]:
        """Return the recompute mode of each stage that does not store all activations."""
        given = self.recompute
        wanted = dict(given) if isinstance(given, Mapping) else dict.fromkeys(range(stages), given)
        for mode in (*wanted.values(), given) if isinstance(given, str) else wanted.values():
            if mode not in get_args(Mode):
                modes = ", ".join(get_args(Mode))
                raise _make_error(
                    f"recompute={mode!r}", "there is no such mode", f"use one of {modes}"
                )
        return {k: cast(Mode, mode) for k, mode in wanted.items() if mode != "none"}

    def describe(self) -> str:
        """Return all options as text for comparison between ranks."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = to_text(self.schedule)
        return " ".join(f"{name} {value}" for name, value in values.items())

    @property
    def schedule_name(self) -> str:
        """The name of the schedule."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name


def _make_error(where: str, why: str, fix: str) -> Exception:
    return error("FXP109", where=where, why=why, fix=fix)
