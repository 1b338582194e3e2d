"""Talk between the lanes of a stage: collectives with gradients, and ops whose cut needs them."""

from __future__ import annotations

from fxpart.collectives.buckets import (
    BUCKET,
    Pending,
    all_gather_many,
    all_reduce_many,
    reduce_scatter_many,
    start_all_gather,
    start_reduce_scatter,
    start_sum,
)
from fxpart.collectives.communicator import Axis, Communicator, Counts, Handle
from fxpart.collectives.expert_forms import experts_cut, experts_dispatched
from fxpart.collectives.failures import PeerLostError, TransferTimeoutError
from fxpart.collectives.fake import FakeCommunicator
from fxpart.collectives.group import GroupCommunicator
from fxpart.collectives.inprocess import InProcessHub
from fxpart.collectives.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    enter,
    first_only,
    leave,
    reduce_scatter,
    slice_shard,
)

__all__ = [
    "BUCKET",
    "Axis",
    "Communicator",
    "Counts",
    "FakeCommunicator",
    "GroupCommunicator",
    "Handle",
    "InProcessHub",
    "PeerLostError",
    "Pending",
    "TransferTimeoutError",
    "all_gather",
    "all_gather_many",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "enter",
    "experts_cut",
    "experts_dispatched",
    "first_only",
    "leave",
    "reduce_scatter",
    "reduce_scatter_many",
    "slice_shard",
    "start_all_gather",
    "start_reduce_scatter",
    "start_sum",
]
