"""What happens in a simulation: a schedule's actions, and moments and work beside them."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True)
class Begin:
    """The moment at which a rank comes to an action, before it does it. Takes no time."""

    action: Action

    def __str__(self) -> str:
        return f"begin of {self.action}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """The moment at which the receiver of what was sent can go on; it may want a core first."""

    send: Action

    def __str__(self) -> str:
        return f"arrival of {self.send}"


@dataclass(frozen=True, slots=True)
class Update:
    """What a stage does once a step, after the step's last backward: sums, optimizer."""

    stage: int
    step: int

    def __str__(self) -> str:
        return f"update {self.step} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Join:
    """The moment at which all ranks have come through a step's passes (or updates)."""

    step: int
    updated: bool

    def __str__(self) -> str:
        return f"end of step {self.step}"


Event = Action | Begin | Arrival | Update | Join
Times = dict[Event, tuple[float, float]]


def receives(action: Action) -> bool:
    """Whether the action is the receiving end of a transfer."""
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


def is_send(action: Action) -> bool:
    """Whether the action is the sending end of a transfer."""
    return action.kind in (Kind.SEND_F, Kind.SEND_B)
