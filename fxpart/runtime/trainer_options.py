"""How a trainer works, as data: what every rank has to be given alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

from fxpart.errors import error
from fxpart.runtime.executor.recompute import Mode
from fxpart.schedule.action import Schedule
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.text import to_text


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The keyword arguments of :class:`~fxpart.runtime.trainer.Trainer` that are plain data.

    microbatches: into how many a batch is cut (fewer if it has fewer rows). schedule: a name,
    or computations for stages on these ranks (or on others that share stages alike).
    clip_norm: largest global gradient norm. clip_value: largest absolute value of any gradient's
    numbers; one of the two at most. log_grad_norm: compute the global norm at every update, also
    where nothing is clipped by it. seed: of random ops, by default the program's. recompute: which
    activations a backward makes again ("none", "selective", "full"), of all stages or by stage: see
    :mod:`fxpart.runtime.executor.recompute`. compile_stages: a backend of torch.compile for each
    stage, or whether to take inductor: see :mod:`fxpart.runtime.executor.torch_compile`. pin: give
    each local rank cores of its own, or "auto" where that gains something: see
    :mod:`fxpart.runtime.host.cpu_affinity`.
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

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """From keyword arguments; FXP109 for an unknown one and for values that cannot be."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise _wrong(name, "there is no such option", f"one of {', '.join(known)}")
        made = cls(**given)
        for name in ("clip_norm", "clip_value"):
            largest = getattr(made, name)
            if largest is not None and not largest > 0:
                raise _wrong(f"{name}={largest}", "it is not above zero", "leave it out")
        if made.clip_norm is not None and made.clip_value is not None:
            raise _wrong("clip_norm, clip_value", "both are given", "give one of them")
        made.recomputes(0)
        return made

    def recomputes(self, stages: int) -> dict[int, Mode]:
        """The mode of each stage that does not keep all activations."""
        given = self.recompute
        wanted = dict(given) if isinstance(given, Mapping) else dict.fromkeys(range(stages), given)
        for mode in (*wanted.values(), given) if isinstance(given, str) else wanted.values():
            if mode not in get_args(Mode):
                modes = ", ".join(get_args(Mode))
                raise _wrong(f"recompute={mode!r}", "there is no such mode", f"one of {modes}")
        return {k: cast(Mode, mode) for k, mode in wanted.items() if mode != "none"}

    def describe(self) -> str:
        """All of them in text, for ranks to compare."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = to_text(self.schedule)
        return " ".join(f"{name} {value}" for name, value in values.items())

    @property
    def schedule_name(self) -> str:
        """What the schedule is called."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name


def _wrong(where: str, why: str, fix: str) -> Exception:
    return error("FXP109", where=where, why=why, fix=fix)
