"""Collectives with gradients between the mesh ranks of a stage, and ops that need them."""

from __future__ import annotations

from fxpart.collectives.all_to_all_embedding import embedding_bag_sent, embedding_sent
from fxpart.collectives.buckets import (
    BUCKET,
    BucketedCollective,
    start_all_gather,
    start_reduce_scatter,
    start_sum,
)
from fxpart.collectives.communicator import (
    Axis,
    CollectiveHandle,
    CommunicationCounts,
    Communicator,
)
from fxpart.collectives.context_attention import attention_rows
from fxpart.collectives.differentiable_ops import (
    all_gather,
    all_reduce,
    all_to_all,
    enter,
    first_only,
    leave,
    reduce_scatter,
    slice_shard,
)
from fxpart.collectives.expert_parallel import experts_cut, experts_dispatched
from fxpart.collectives.failures import PeerLostError, TransferTimeoutError
from fxpart.collectives.fake_communicator import FakeCommunicator
from fxpart.collectives.group_communicator import GroupCommunicator
from fxpart.collectives.in_process_hub import InProcessHub
from fxpart.collectives.parallel_losses import (
    cross_entropy_classes,
    cross_entropy_rows,
    cross_entropy_rows_classes,
    nll_loss_rows,
)
from fxpart.collectives.parallel_means import (
    binary_cross_entropy_rows,
    binary_cross_entropy_with_logits_rows,
    ctc_loss_rows,
    hinge_embedding_loss_rows,
    huber_loss_rows,
    kl_div_rows,
    l1_loss_rows,
    mean_rows,
    mse_loss_rows,
    poisson_nll_loss_rows,
    smooth_l1_loss_rows,
    soft_margin_loss_rows,
)
from fxpart.collectives.random_ops import random_shard
from fxpart.collectives.row_index import index_own_rows
from fxpart.collectives.sync_batch_norm import batch_norm_rows
from fxpart.collectives.vocab_parallel_embedding import (
    embedding_bag_bags,
    embedding_bag_bags_rows,
    embedding_bag_rows,
    embedding_rows,
)

__all__ = [
    "BUCKET",
    "Axis",
    "BucketedCollective",
    "CollectiveHandle",
    "CommunicationCounts",
    "Communicator",
    "FakeCommunicator",
    "GroupCommunicator",
    "InProcessHub",
    "PeerLostError",
    "TransferTimeoutError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention_rows",
    "batch_norm_rows",
    "binary_cross_entropy_rows",
    "binary_cross_entropy_with_logits_rows",
    "cross_entropy_classes",
    "cross_entropy_rows",
    "cross_entropy_rows_classes",
    "ctc_loss_rows",
    "embedding_bag_bags",
    "embedding_bag_bags_rows",
    "embedding_bag_rows",
    "embedding_bag_sent",
    "embedding_rows",
    "embedding_sent",
    "enter",
    "experts_cut",
    "experts_dispatched",
    "first_only",
    "hinge_embedding_loss_rows",
    "huber_loss_rows",
    "index_own_rows",
    "kl_div_rows",
    "l1_loss_rows",
    "leave",
    "mean_rows",
    "mse_loss_rows",
    "nll_loss_rows",
    "poisson_nll_loss_rows",
    "random_shard",
    "reduce_scatter",
    "slice_shard",
    "smooth_l1_loss_rows",
    "soft_margin_loss_rows",
    "start_all_gather",
    "start_reduce_scatter",
    "start_sum",
]
