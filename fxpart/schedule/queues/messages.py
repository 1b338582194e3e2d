"""What copies and their dispatcher say to each other: small messages without tensors."""

from __future__ import annotations

import msgspec


class DispatcherMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message. minibatch, microbatch: numbers from 0; copies go by their stage's number."""


# -- events: a copy tells the dispatcher --------------------------------------------------------


class MinibatchStartReport(DispatcherMessage, frozen=True):
    """The copy has the batch of a minibatch, in so many microbatches; text: what all must have.

    asks: what its process asks of all; 0: nothing.
    """

    minibatch: int
    count: int
    text: str
    asks: int = 0


class ComputationReport(DispatcherMessage, frozen=True):
    """A forward, or with ``back`` a backward, has run. loss: its part of the minibatch's loss.

    seconds: that it took; 0 where that is not known.
    """

    back: bool
    minibatch: int
    microbatch: int
    loss: float | None = None
    seconds: float = 0.0


class GradientsReport(DispatcherMessage, frozen=True):
    """The copy has all gradients of what it holds. square: of their sums' norm, in its group."""

    minibatch: int
    attempt: int
    square: float = 0.0


class BarrierArrival(DispatcherMessage, frozen=True):
    """The copy waits until all others have come as far."""

    number: int


class FailureReport(DispatcherMessage, frozen=True):
    """The copy cannot go on. problems: (code, where, why, fix) of each."""

    problems: tuple[tuple[str, str, str, str], ...]


class ReplicaLossReport(DispatcherMessage, frozen=True):
    """Another copy is not reached any more."""

    copy: int


Event = (
    MinibatchStartReport
    | ComputationReport
    | GradientsReport
    | BarrierArrival
    | FailureReport
    | ReplicaLossReport
)

# -- orders: the dispatcher tells a copy ----------------------------------------------------------

To = tuple[tuple[int, int], ...]  # (group, copy of it)
Asked = tuple[tuple[int, int], ...]  # (copy, number)


class ForwardOrder(DispatcherMessage, frozen=True):
    """Run a forward when its values are there; send what it gives to these copies."""

    minibatch: int
    microbatch: int
    to: To


class BackwardOrder(DispatcherMessage, frozen=True):
    """Run a backward when its gradients are there; send what it gives to these copies."""

    minibatch: int
    microbatch: int
    to: To


class SendOrder(DispatcherMessage, frozen=True):
    """Send what a forward (with ``back``: a backward) gave for a group to this copy of it."""

    back: bool
    minibatch: int
    microbatch: int
    group: int
    copy: int


class GradientExchangeOrder(DispatcherMessage, frozen=True):
    """Send the minibatch's gradients to these copies of the group, and gather theirs.

    count: of its microbatches. others: (group, its copies) with parameters that this group holds
    too: of those, they are sent the gradients and send theirs.
    """

    minibatch: int
    attempt: int
    copies: tuple[int, ...]
    count: int
    others: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """All whose gradients are needed."""
        return self.copies + tuple(copy for _, copies in self.others for copy in copies)


class UpdateOrder(DispatcherMessage, frozen=True):
    """Update with what was gathered: every group has it. square: of the norm of all gradients.

    What was kept for the minibatch is not asked for again. loss: of the minibatch. asked: what
    copies asked of all when they began it.
    """

    minibatch: int
    loss: float | None
    square: float
    asked: Asked = ()


class BarrierRelease(DispatcherMessage, frozen=True):
    """All have come as far as :class:`BarrierArrival` said. lost: copies that are gone."""

    number: int
    lost: tuple[int, ...]


class StopOrder(DispatcherMessage, frozen=True):
    """The training has ended. problems: as of :class:`FailureReport`."""

    problems: tuple[tuple[str, str, str, str], ...]


Order = (
    ForwardOrder
    | BackwardOrder
    | SendOrder
    | GradientExchangeOrder
    | UpdateOrder
    | BarrierRelease
    | StopOrder
)
