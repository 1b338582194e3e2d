"""Private state of torch.distributed's process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the store of the default process group; None if it is not available.

    Uses ``distributed_c10d._get_default_store``; a group created by MPI has none.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    try:
        return None if found is None else found()
    except (ValueError, RuntimeError, KeyError):
        return None
