"""Weight modes: which weights an asynchronous pipeline's forwards and backwards read.

A mode has four properties: the version a forward starts from, the weights of its backward, how far
ahead each of them predicts, and the prediction rule. Each named method is a preset. Papers:
PipeDream (SOSP 2019), SpecTrain (arXiv 1809.02839), XPipe (1911.04610), PipeDream-2BW (ICML 2021),
PipeMare (1910.05124), PipeOptim (2312.00839), Nesterov for asynchronous pipelines (2505.01099),
error feedback for delayed updates (2606.30634), PACI (2606.07881).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from fxpart.errors import error, quoted
from fxpart.registry import Registry

Base = Literal["applied", "first stage", "delayed", "first microbatch"]
Backward = Literal["forward", "applied", "corrected"]
Horizon = Literal["none", "staleness", "middle", "depth"]
Rule = Literal["linear", "decaying", "difference", "shadow"]

RULES: tuple[Rule, ...] = ("linear", "decaying", "difference", "shadow")


@dataclass(frozen=True)
class WeightMode:
    """Which weights the computations of an asynchronous pipeline read.

    name: of the preset, or "custom". base: the version from which a forward starts: all updates
    "applied" on its stage so far; as many as the "first stage" had for the same microbatch
    (vertical sync); one update before those of earlier minibatches ("delayed", double buffer); as
    many as had been applied for the "first microbatch" of its minibatch. backward: the exact
    weights of the "forward"; those with all updates "applied" by then; or the latter "corrected" by
    their mean change (PipeMare). look_forward, look_backward: by how many updates ahead each
    predicts: "none"; the "staleness" of the microbatch on the stage, s = u_b - u_f; "middle", the
    first rule of SpecTrain, which predicts one common time for all stages: in the forward the
    staleness plus half of the first stage's additional staleness, in the backward that half alone
    (both smaller than the paper's constants while the pipeline fills, as the staleness is);
    "depth": the first stage's staleness. rule: the prediction rule
    (:mod:`fxpart.runtime.weight_prediction`). discount: whether the learning rate is divided by a
    power of the staleness (PipeMare, T1). flush: whether the pipeline is flushed before each
    update; a mode that flushes and predicts uses the distance of a mode without flushes
    ("lookahead", the control experiment for prediction). optimizer: the optimizer that the method
    prescribes, with ``PRESCRIBED_OPTIONS``, unless the user gives one; "" for none. feedback: the
    fraction of the error of a late update that the next one adds, for updates that are one step
    late ("delayed", :mod:`fxpart.runtime.weight_prediction.error_feedback`).

    supports_queues: whether its updates may come in an order that is not known in advance, as with
    queues. remedy: its rank among the modes that are suggested if memory is insufficient, fewest
    weight copies first; 0: not suggested. forward_reads, backward_reads: short descriptions for the
    documents.
    """

    name: str
    base: Base = "applied"
    backward: Backward = "forward"
    look_forward: Horizon = "none"
    look_backward: Horizon = "none"
    rule: Rule = "linear"
    discount: bool = False
    flush: bool = False
    optimizer: str = ""
    feedback: float = field(default=0.0, kw_only=True)
    supports_queues: bool = field(default=False, kw_only=True)
    remedy: int = field(default=0, kw_only=True, compare=False)
    forward_reads: str = field(default="", kw_only=True, compare=False, repr=False)
    backward_reads: str = field(default="the same", kw_only=True, compare=False, repr=False)

    def check(self) -> None:
        """Raise FXP109 for fields that cannot be combined."""
        if self.feedback and (self.base != "delayed" or self.predicts):
            raise error(
                "FXP109",
                where=f"weights={self.name!r}",
                why="error feedback is for updates that are one step late on every stage",
                fix="use base='delayed' without prediction, or feedback=0",
            )
        if self.look_forward != "none" and self.base in ("first stage", "delayed"):
            raise error(
                "FXP109",
                where=f"weights={self.name!r}",
                why="it predicts from an old version, whose optimizer state is not stored",
                fix="use base='applied' or look_forward='none'",
            )

    @property
    def predicts(self) -> bool:
        """Return whether any computation predicts weights."""
        return self.look_forward != "none" or self.look_backward != "none"


# Options of the optimizers that modes prescribe (NAdam: arXiv 2505.01099).
PRESCRIBED_OPTIONS: dict[str, dict[str, Any]] = {"nadam": {"betas": (0.99, 0.999)}}

FLUSH, STASH, SPECTRAIN, PIPEOPTIM = "flush", "stash", "spectrain", "pipeoptim"

_APPLIED = "the newest"
_TO_BACKWARD = "predicted, s ahead"
_MODES = (
    WeightMode(
        FLUSH, flush=True,
        forward_reads="the newest, after a flush",
    ),
    WeightMode(
        "lookahead", flush=True, look_forward="middle",
        forward_reads="as flush, predicted as far as spectrain",
    ),
    WeightMode(
        STASH, supports_queues=True, remedy=6,
        forward_reads=_APPLIED, backward_reads="the same (PipeDream)",
    ),
    WeightMode(
        "vertical", base="first stage",
        forward_reads="the version of the first stage",
    ),
    WeightMode(
        "2bw", base="delayed", remedy=5,
        forward_reads="one update before the newest",
        backward_reads="the same (PipeDream-2BW)",
    ),
    WeightMode(
        "2bw-ef", base="delayed", feedback=1.0,
        forward_reads="as 2bw; the error of each late update is added to the next",
    ),
    WeightMode(
        "naive", backward="applied", supports_queues=True, remedy=1,
        forward_reads=_APPLIED, backward_reads=_APPLIED,
    ),
    WeightMode(
        SPECTRAIN, backward="applied", look_forward="middle", look_backward="middle", remedy=2,
        forward_reads="predicted, s and up to K/2 ahead",
        backward_reads="predicted, up to K/2 ahead",
    ),
    WeightMode(
        "spectrain-v2", look_forward="staleness", supports_queues=True,
        forward_reads=_TO_BACKWARD,
    ),
    WeightMode(
        PIPEOPTIM, backward="applied", look_forward="staleness", supports_queues=True, remedy=3,
        forward_reads=_TO_BACKWARD, backward_reads=_APPLIED,
    ),
    WeightMode(
        "xpipe", base="first microbatch", look_forward="staleness",
        forward_reads="predicted, as the first microbatch of its minibatch",
    ),
    WeightMode(
        "pipemare", backward="corrected", discount=True, remedy=4,
        forward_reads=f"{_APPLIED}, smaller learning rate",
        backward_reads="the newest - s δ",
    ),
    WeightMode(
        "nadam-stash", optimizer="nadam",
        forward_reads="as stash, with NAdam",
    ),
)  # fmt: skip


def _check_mode(name: str, mode: Any) -> None:
    """Raise FXP109 if the object cannot be registered as a weight mode."""
    why = ""
    if not isinstance(mode, WeightMode):
        why = f"A weight mode is a WeightMode, not a {type(mode).__name__}."
    elif mode.name != name:
        why = f"The mode has the different name {quoted(mode.name)}."
    elif mode.flush:
        why = "A registered weight mode must not flush before each update."
    elif not mode.forward_reads:
        why = "The mode needs a description of the forward's weights in forward_reads."
    elif "," in name or name.split() != [name]:
        why = "The name has a comma or a space."
    if why:
        raise error(
            "FXP109",
            where=f"weight mode {quoted(name)}",
            why=why,
            fix="`fxpart explain schedules` shows how to register a weight mode.",
        )


MODES: Registry[WeightMode] = Registry(
    "weight mode",
    {mode.name: mode for mode in _MODES},
    group="fxpart.weight_modes",
    check=_check_mode,
)


def register_weight_mode(mode: WeightMode) -> WeightMode:
    """Add a weight mode to this process, under its own name, and return it.

    Every rank has to register it before it compiles or loads a plan with it; an installed package
    adds it for all processes through the entry point group "fxpart.weight_modes". Raises FXP109
    for a name that is taken and for a mode that flushes.
    """
    if not isinstance(mode, WeightMode):
        _check_mode("", mode)
    return MODES.register(mode.name, mode)


def list_queue_modes() -> tuple[str, ...]:
    """Return the names of the modes that microbatches from queues may use, the default first."""
    return tuple(name for name, mode in MODES.items() if mode.supports_queues)


def list_unflushed_modes() -> tuple[str, ...]:
    """Return the names of the modes that do not flush before each update."""
    return tuple(name for name, mode in MODES.items() if not mode.flush)


def list_remedy_modes() -> tuple[str, ...]:
    """Return the names of the modes that are offered where memory lacks, fewest copies first."""
    found = sorted((mode.remedy, name) for name, mode in MODES.items() if mode.remedy)
    return tuple(name for _, name in found)


def weight_mode(given: str | WeightMode) -> WeightMode:
    """Return the mode of that name, or as it was given; FXP109 for an unknown name."""
    if isinstance(given, WeightMode):
        return given
    return MODES.lookup(given, where=f"weights={given!r}")


def document_mode_rows() -> Iterator[str]:
    """Yield the table of the built-in weight modes as the documents show it."""
    yield "| mode | a forward reads | its backward reads |"
    yield "|---|---|---|"
    for name in MODES.builtin:
        yield f"| `{name}` | {MODES[name].forward_reads} | {MODES[name].backward_reads} |"
