"""What happens in a simulation: a schedule's actions, and moments and work beside them."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.schedule.action import Action, ActionKind


@dataclass(frozen=True, slots=True)
class ActionStart:
    """The moment at which a rank comes to an action, before it does it. Takes no time."""

    action: Action

    def __str__(self) -> str:
        return f"begin of {self.action}"


@dataclass(frozen=True, slots=True)
class TransferArrival:
    """The moment at which the receiver of what was sent can go on; it may want a core first."""

    send: Action

    def __str__(self) -> str:
        return f"arrival of {self.send}"


@dataclass(frozen=True, slots=True)
class StageUpdateEvent:
    """What a stage does once a step, after the step's last backward: sums, optimizer."""

    stage: int
    step: int

    def __str__(self) -> str:
        return f"update {self.step} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class StepBarrier:
    """The moment at which all ranks have come through a step's passes (or updates)."""

    step: int
    updated: bool

    def __str__(self) -> str:
        return f"end of step {self.step}"


Event = Action | ActionStart | TransferArrival | StageUpdateEvent | StepBarrier
Times = dict[Event, tuple[float, float]]


def is_receive(action: Action) -> bool:
    """Whether the action is the receiving end of a transfer."""
    return action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)


def is_send(action: Action) -> bool:
    """Whether the action is the sending end of a transfer."""
    return action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
