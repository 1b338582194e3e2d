"""Actions: what one rank does at one moment, in torch's own text grammar.

``0F3`` is stage 0's forward of microbatch 3, ``2SEND_B1`` sends stage 2's input gradients of
microbatch 1. Where a transfer does not go to the neighbouring stage (a skip connection) the peer
stage follows: ``0SEND_F1>3``. ``@2`` names the weight version that is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from fxpart.errors import error


class Kind(Enum):
    """What an action does; I and W split a backward into its input and weight halves."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """Whether the action runs a stage, rather than moving data."""
        return self in (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    stage: the rank's own stage (0-based). microbatch: 0-based. peer: for transfers the other
    stage, otherwise None. version: the weight version read, None where it is the latest.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None
    version: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is not None and self.peer != default_peer(self.stage, self.kind):
            text += f">{self.peer}"
        return text if self.version is None else f"{text}@{self.version}"


def default_peer(stage: int, kind: Kind) -> int | None:
    """The peer that the text leaves out: the neighbour in a chain of stages."""
    if kind in (Kind.SEND_F, Kind.RECV_B):
        return stage + 1
    if kind in (Kind.RECV_F, Kind.SEND_B):
        return stage - 1
    return None


_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:>(\d+))?(?:@(\d+))?")


def parse(text: str) -> Action:
    """The action that ``str(action)`` wrote; raises FXP303 on any other text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise error(
            "FXP303",
            where=f"action {text!r}",
            why="it is not of the form <stage><kind><microbatch>[>peer][@version]",
            fix="write for example 0F3, 2SEND_B1, 0SEND_F1>3 or 0F3@2",
        )
    stage, kind, microbatch, peer, version = match.groups()
    what = Kind(kind)
    return Action(
        int(stage),
        what,
        int(microbatch),
        int(peer) if peer is not None else default_peer(int(stage), what),
        int(version) if version is not None else None,
    )


@dataclass(frozen=True)
class Schedule:
    """Action lists, one per rank, and the edges they serve.

    name: "gpipe", "1f1b", ... ; stages: number of stages; microbatches: number of them;
    ranks: per rank its actions in order; stage_rank: the rank that holds each stage.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]


@dataclass(frozen=True)
class StageEdge:
    """Values go from stage ``source`` to stage ``target`` (source < target) for each microbatch.

    backward: whether gradients come back over the edge.
    """

    source: int
    target: int
    backward: bool = True
