"""Messages between replicas and their dispatcher: small, without tensors."""

from __future__ import annotations

import msgspec


class DispatcherMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message. minibatch, microbatch: 0-based. A replica is identified by its stage index."""


# -- events: from a replica to the dispatcher ----------------------------------------------------


class MinibatchStartReport(DispatcherMessage, frozen=True):
    """The replica has the batch of a minibatch, in ``count`` microbatches.

    text: a description of the batch that must be equal on all ranks. requests: the bit mask of
    requests of its process to all ranks; 0: none.
    """

    minibatch: int
    count: int
    text: str
    requests: int = 0


class ComputationReport(DispatcherMessage, frozen=True):
    """A forward, or with ``back`` a backward, has run.

    loss: its part of the minibatch's loss. seconds: its duration; 0 if unknown.
    """

    back: bool
    minibatch: int
    microbatch: int
    loss: float | None = None
    seconds: float = 0.0


class GradientsReport(DispatcherMessage, frozen=True):
    """The replica has all gradients of its parameters. square: squared norm of the group's
    gradients."""

    minibatch: int
    attempt: int
    square: float = 0.0


class BarrierArrival(DispatcherMessage, frozen=True):
    """The replica waits at a barrier."""

    number: int


class FailureReport(DispatcherMessage, frozen=True):
    """The replica cannot continue. problems: (code, where, why, fix) of each."""

    problems: tuple[tuple[str, str, str, str], ...]


class ReplicaLossReport(DispatcherMessage, frozen=True):
    """Another replica is unreachable."""

    replica: int


Event = (
    MinibatchStartReport
    | ComputationReport
    | GradientsReport
    | BarrierArrival
    | FailureReport
    | ReplicaLossReport
)

# -- orders: from the dispatcher to a replica ----------------------------------------------------

To = tuple[tuple[int, int], ...]  # (group, replica in it)
Requests = tuple[tuple[int, int], ...]  # (replica, bit mask of requests)


class ForwardOrder(DispatcherMessage, frozen=True):
    """Run a forward when its inputs have arrived, and send its outputs to these replicas."""

    minibatch: int
    microbatch: int
    to: To


class BackwardOrder(DispatcherMessage, frozen=True):
    """Run a backward when its gradients have arrived, and send its results to these replicas."""

    minibatch: int
    microbatch: int
    to: To


class SendOrder(DispatcherMessage, frozen=True):
    """Send the result of a forward (with ``back``: a backward) for a group to this replica."""

    back: bool
    minibatch: int
    microbatch: int
    group: int
    replica: int


class GradientExchangeOrder(DispatcherMessage, frozen=True):
    """Exchange the minibatch's gradients with these replicas of the group.

    count: its number of microbatches. others: (group, its replicas) that share parameters with this
    group and exchange the gradients of these.
    """

    minibatch: int
    attempt: int
    replicas: tuple[int, ...]
    count: int
    others: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Return all replicas whose gradients are needed."""
        return self.replicas + tuple(replica for _, replicas in self.others for replica in replicas)


class UpdateOrder(DispatcherMessage, frozen=True):
    """Apply the exchanged gradients: every group has them.

    The results stored for the minibatch are not needed any more. loss: of the minibatch. square:
    squared norm of all gradients. requests: the requests of the replicas when they began it.
    """

    minibatch: int
    loss: float | None
    square: float
    requests: Requests = ()


class BarrierRelease(DispatcherMessage, frozen=True):
    """All replicas have reached the :class:`BarrierArrival`. lost: lost replicas."""

    number: int
    lost: tuple[int, ...]


class StopOrder(DispatcherMessage, frozen=True):
    """The training has ended. problems: as in :class:`FailureReport`."""

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
