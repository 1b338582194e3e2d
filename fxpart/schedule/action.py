"""Actions: what one rank does at one moment, in torch's own text grammar.

``0F3`` is stage 0's forward of microbatch 3, ``2SEND_B1`` sends stage 2's input gradients of
microbatch 1. Where a transfer does not go to the neighbouring stage (a skip connection) the peer
stage follows: ``0SEND_F1>3``. ``@2`` names the weight version that is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fxpart.errors import FxpartError, error

FORWARD = "forward"  # the name of schedules that only evaluate


class ActionKind(Enum):
    """What an action does; I and W split a backward into its input and weight halves."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    is_compute: bool
    # Members are single objects: by identity is right, and five times faster than by name.
    __hash__ = object.__hash__

    def __init__(self, text: str) -> None:
        """Whether the kind runs a stage (one letter) or moves data (a word)."""
        self.is_compute = len(text) == 1


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    stage: the rank's own stage (0-based). microbatch: 0-based. peer: for transfers the other
    stage, otherwise None. version: the weight version read, None where it is the latest.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        """A transfer has a peer, a computation has none."""
        assert (self.peer is None) == self.kind.is_compute, "exactly the transfers have a peer"

    @property
    def plain(self) -> Action:
        """The same action without the weight version: what dependence speaks of."""
        if self.version is None:
            return self
        return Action(self.stage, self.kind, self.microbatch, self.peer)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is not None and self.peer != default_peer(self.stage, self.kind):
            text += f">{self.peer}"
        return text if self.version is None else f"{text}@{self.version}"


def default_peer(stage: int, kind: ActionKind) -> int | None:
    """The peer that the text leaves out: the neighbour in a chain of stages."""
    if kind in (ActionKind.SEND_F, ActionKind.RECV_B):
        return stage + 1
    if kind in (ActionKind.RECV_F, ActionKind.SEND_B):
        return stage - 1
    return None


# At most nine digits, and ASCII ones: no text may make a reader build a huge number.
_NUMBER = "([0-9]{1,9})"
_TEXT = re.compile(
    rf"{_NUMBER}(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W){_NUMBER}(?:>{_NUMBER})?(?:@{_NUMBER})?"
)


def parse(text: str) -> Action:
    """The action that ``str(action)`` wrote; raises FXP303 on any other text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise _unreadable(text, "it is not of the form <stage><kind><microbatch>[>peer][@version]")
    stage, kind, microbatch, peer, version = match.groups()
    what = ActionKind(kind)
    other = int(peer) if peer is not None else default_peer(int(stage), what)
    if what.is_compute and other is not None:
        raise _unreadable(text, "only a transfer has a peer stage")
    if other is not None and (other < 0 or other == int(stage)):
        raise _unreadable(text, "its peer is no other stage")
    return Action(
        int(stage), what, int(microbatch), other, int(version) if version is not None else None
    )


def _unreadable(text: str, why: str) -> FxpartError:
    return error(
        "FXP303",
        where=f"action {text[:60]!r}",
        why=why,
        fix="write for example 0F3, 2SEND_B1, 0SEND_F1>3 or 0F3@2",
    )


@dataclass(frozen=True, slots=True)
class RoundRobinSlots:
    """The places that a stage has in a round of ``size`` microbatches."""

    places: tuple[int, ...]
    size: int

    def has(self, microbatch: int) -> bool:
        """Whether the microbatch is the stage's to do."""
        return microbatch % self.size in self.places


def list_group_stages(group: Sequence[int]) -> tuple[int, ...]:
    """The stages of a round of turns, each once."""
    return tuple(dict.fromkeys(group))


@dataclass(frozen=True)
class Schedule:
    """Action lists, one per rank.

    name: "gpipe", "1f1b", "forward" (evaluation: no backward) or any other; stages: number of
    stages; microbatches: number of them; ranks: per rank its actions in order; stage_rank: the
    rank that holds each stage. replicas: groups of stages that are copies of one another (two ranks
    that feed three), each as a round of turns: microbatch m is done by the stage that stands at m
    modulo the round's length, by no other. A copy that is faster may stand there several times:
    (0, 0, 1) gives stage 0 two microbatches of three.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...] = ()

    def takes(self, stage: int, microbatch: int) -> bool:
        """Whether the stage does that microbatch: all do, but for copies, which take turns."""
        return self.turn(stage).has(microbatch)

    def turn(self, stage: int) -> RoundRobinSlots:
        """When the stage's turn is; always where it has no copies."""
        for group in self.replicas:
            if stage in group:
                places = tuple(place for place, other in enumerate(group) if other == stage)
                return RoundRobinSlots(places, len(group))
        return RoundRobinSlots((0,), 1)

    def taken(self, stage: int) -> tuple[int, ...]:
        """The microbatches that the stage does, rising."""
        turn = self.turn(stage)
        return tuple(m for m in range(self.microbatches) if turn.has(m))

    @property
    def trains(self) -> bool:
        """Whether each microbatch is also taken backward; all but "forward" do."""
        return self.name != FORWARD

    @property
    def is_lowered(self) -> bool:
        """Whether there is a transfer among the actions."""
        return any(not action.kind.is_compute for actions in self.ranks for action in actions)


@dataclass(frozen=True)
class StageEdge:
    """Values go from stage ``source`` to stage ``target`` (source < target) for each microbatch.

    backward: whether gradients come back over the edge.
    """

    source: int
    target: int
    backward: bool = True
