"""Weight modes: which weights an asynchronous pipeline's forwards and backwards read.

Four choices, of which each named method is a preset: the version a forward starts from, the weights
of its backward, how far ahead each of them looks, and the rule by which it looks. Papers: PipeDream
(SOSP 2019), SpecTrain (arXiv 1809.02839), XPipe (1911.04610), PipeDream-2BW (ICML 2021), PipeMare
(1910.05124), PipeOptim (2312.00839), Nesterov for asynchronous pipelines (2505.01099).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fxpart.errors import error

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
    many as had been applied for the "first microbatch" of its minibatch. backward: the very weights
    of the "forward", those with all updates "applied" by then, or these "corrected" by what they
    moved on average (PipeMare). look_forward, look_backward: by how many updates each looks ahead:
    "none"; the "staleness" of the microbatch on the stage, s = u_b - u_f; "middle", SpecTrain's
    first rule, which aims at one moment for all stages: the staleness and half of what the first
    stage has more in the forward, that half alone in the backward; "depth": the first stage's
    staleness. rule: how it looks ahead (:mod:`fxpart.runtime.weight_prediction`). discount: whether
    the learning rate is divided by a power of the staleness (PipeMare, T1). flush: whether the
    pipeline drains before each update; a mode that flushes and looks ahead looks as far as one that
    does not would ("lookahead", the control of every claim about prediction). optimizer: what the
    method prescribes, "" for the user's own.
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

    @property
    def predicts(self) -> bool:
        """Whether anything looks ahead."""
        return self.look_forward != "none" or self.look_backward != "none"


MODES: Mapping[str, WeightMode] = {
    mode.name: mode
    for mode in (
        WeightMode("flush", flush=True),
        WeightMode("lookahead", flush=True, look_forward="middle"),
        WeightMode("stash"),
        WeightMode("vertical", base="first stage"),
        WeightMode("2bw", base="delayed"),
        WeightMode("naive", backward="applied"),
        WeightMode("spectrain", backward="applied", look_forward="middle", look_backward="middle"),
        WeightMode("spectrain-v2", look_forward="staleness"),
        WeightMode("pipeoptim", backward="applied", look_forward="staleness"),
        WeightMode("xpipe", base="first microbatch", look_forward="staleness"),
        WeightMode("pipemare", backward="corrected", discount=True),
        WeightMode("nadam-stash", optimizer="nadam"),
    )
}

# Those whose updates may come in no order that is known beforehand, as they do from queues.
QUEUED = ("stash", "naive", "spectrain-v2", "pipeoptim")


def weight_mode(given: str | WeightMode) -> WeightMode:
    """The mode of that name, or as it was given; FXP109 for an unknown name."""
    if isinstance(given, WeightMode):
        return given
    if not isinstance(given, str) or given not in MODES:
        raise error(
            "FXP109",
            where=f"weights={given!r}",
            why="there is no weight mode of that name",
            fix=f"one of {', '.join(MODES)}",
        )
    return MODES[given]
