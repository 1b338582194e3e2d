"""Actions: one operation of one rank, in the text grammar of torch.distributed.pipelining.

``0F3`` is the forward of microbatch 3 on stage 0. ``2SEND_B1`` sends the input gradients of stage 2
for microbatch 1. If a transfer does not go to the adjacent stage (a skip connection), the peer
stage follows: ``0SEND_F1>3``. ``@2`` names the weight version that the computation reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from fxpart.errors import FxpartError, error

FORWARD = "forward"  # name of the evaluation schedule, which has no backwards


class ActionKind(Enum):
    """Kind of an action; I and W are the input-gradient and weight-gradient halves of a B.

    REDUCE and UPDATE are those of an asynchronous stage after the last backward of a minibatch.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"

    is_compute: bool
    is_transfer: bool
    # Members are singletons, so hashing by identity is correct, and five times faster than by name.
    __hash__ = object.__hash__

    def __init__(self, text: str) -> None:
        """Store whether the kind computes (one letter) or transfers data to another stage."""
        self.is_compute = len(text) == 1
        self.is_transfer = text.startswith(("SEND", "RECV"))


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    stage: the stage on this rank (0-based). microbatch: 0-based. peer: the other stage of a
    transfer, None for a computation. version: the weight version that is read, None for the latest.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        """Check that exactly the transfers have a peer."""
        assert (self.peer is not None) == self.kind.is_transfer, "exactly the transfers have a peer"

    @property
    def plain(self) -> Action:
        """Return the action without its weight version, as used in dependence queries."""
        if self.version is None:
            return self
        return Action(self.stage, self.kind, self.microbatch, self.peer)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is not None and self.peer != default_peer(self.stage, self.kind):
            text += f">{self.peer}"
        return text if self.version is None else f"{text}@{self.version}"


def default_peer(stage: int, kind: ActionKind) -> int | None:
    """Return the peer that the text omits: the adjacent stage of a chain."""
    if kind in (ActionKind.SEND_F, ActionKind.RECV_B):
        return stage + 1
    if kind in (ActionKind.RECV_F, ActionKind.SEND_B):
        return stage - 1
    return None


# At most nine ASCII digits, so that no input can make a parser build a huge number.
_NUMBER = "([0-9]{1,9})"
_TEXT = re.compile(
    rf"{_NUMBER}(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|UPDATE|F|B|I|W){_NUMBER}(?:>{_NUMBER})?(?:@{_NUMBER})?"
)


def parse(text: str) -> Action:
    """Return the action whose ``str`` is the text; raise FXP303 on any other text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise _make_error(
            text, "The text is not of the form <stage><kind><microbatch>[>peer][@version]."
        )
    stage, kind, microbatch, peer, version = match.groups()
    what = ActionKind(kind)
    other = int(peer) if peer is not None else default_peer(int(stage), what)
    if not what.is_transfer and other is not None:
        raise _make_error(text, "Only a transfer has a peer stage.")
    if other is not None and (other < 0 or other == int(stage)):
        raise _make_error(text, "The peer of a transfer must be another stage.")
    return Action(
        int(stage), what, int(microbatch), other, int(version) if version is not None else None
    )


def parse_scheduled(text: str) -> Action:
    """Return an action of a schedule; FXP303 for updates too, which follow from its backwards."""
    action = parse(text)
    if not (action.kind.is_compute or action.kind.is_transfer):
        raise _make_error(text, "A schedule has computations and transfers only.")
    return action


def _make_error(text: str, why: str) -> FxpartError:
    return error(
        "FXP303",
        where=f"action {text[:60]!r}",
        why=why,
        fix="Valid examples: 0F3, 2SEND_B1, 0SEND_F1>3, 0F3@2.",
    )


@dataclass(frozen=True, slots=True)
class RoundRobinSlots:
    """The positions of one replica in a round-robin cycle of ``size`` microbatches."""

    places: tuple[int, ...]
    size: int

    def has(self, microbatch: int) -> bool:
        """Return whether the microbatch is routed to this replica."""
        return microbatch % self.size in self.places


def list_group_stages(group: Sequence[int]) -> tuple[int, ...]:
    """Return the distinct stages of a round-robin cycle."""
    return tuple(dict.fromkeys(group))


@dataclass(frozen=True)
class Schedule:
    """Action lists, one per rank.

    name: "gpipe", "1f1b", "forward" (evaluation, no backwards) or another schedule name. stages,
    microbatches: their numbers. ranks: the ordered actions of each rank. stage_rank: the rank of
    each stage. replicas: groups of replicated stages, each as a round-robin cycle: the group's
    stage at position m modulo the cycle length runs microbatch m. A faster replica may occur
    several times in the cycle: (0, 0, 1) gives stage 0 two of three microbatches.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...] = ()

    def runs(self, stage: int, microbatch: int) -> bool:
        """Return whether the stage runs the microbatch; replicas share microbatches round-robin."""
        return self.get_slots(stage).has(microbatch)

    def get_slots(self, stage: int) -> RoundRobinSlots:
        """Return the round-robin slots of the stage; all microbatches if it has no replicas."""
        for group in self.replicas:
            if stage in group:
                places = tuple(place for place, other in enumerate(group) if other == stage)
                return RoundRobinSlots(places, len(group))
        return RoundRobinSlots((0,), 1)

    def list_microbatches(self, stage: int) -> tuple[int, ...]:
        """Return the microbatches of the stage in ascending order."""
        slots = self.get_slots(stage)
        return tuple(m for m in range(self.microbatches) if slots.has(m))

    @property
    def trains(self) -> bool:
        """Return whether each microbatch has a backward; only "forward" has none."""
        return self.name != FORWARD

    @property
    def is_lowered(self) -> bool:
        """Return whether the actions contain transfers."""
        return any(not action.kind.is_compute for actions in self.ranks for action in actions)


@dataclass(frozen=True)
class StageEdge:
    """Dependency of stage ``target`` on stage ``source`` (source < target) for each microbatch.

    backward: whether a gradient is sent back along the edge. outward: the part of the time of both
    transfers that the value takes, for simulations; half where the links there and back are equal.
    """

    source: int
    target: int
    backward: bool = True
    outward: float = field(default=0.5, compare=False)
