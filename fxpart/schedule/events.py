"""Events of a simulation: a schedule's actions, and the points in time and updates around them."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.schedule.action import Action, ActionKind


@dataclass(frozen=True, slots=True)
class ActionStart:
    """The time at which a rank reaches an action, before it runs it. Has no duration."""

    action: Action

    def __str__(self) -> str:
        return f"begin of {self.action}"


@dataclass(frozen=True, slots=True)
class TransferArrival:
    """The time at which a receiver can continue; it may have to wait for a core first."""

    send: Action

    def __str__(self) -> str:
        return f"arrival of {self.send}"


@dataclass(frozen=True, slots=True)
class StageUpdateEvent:
    """Work of a stage per step after its last backward: gradient all-reduce and optimizer step."""

    stage: int
    step: int

    def __str__(self) -> str:
        return f"update {self.step} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class StepBarrier:
    """The time at which all ranks have finished the passes (or the updates) of a step."""

    step: int
    updated: bool

    def __str__(self) -> str:
        return f"end of step {self.step}"


Event = Action | ActionStart | TransferArrival | StageUpdateEvent | StepBarrier
Times = dict[Event, tuple[float, float]]


def is_receive(action: Action) -> bool:
    """Return whether the action is the receiving end of a transfer."""
    return action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)


def is_send(action: Action) -> bool:
    """Return whether the action is the sending end of a transfer."""
    return action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
