"""What torch.distributed does not say of a process group in public."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """The store that the default process group was made with; None where it cannot be had.

    Needs ``distributed_c10d._get_default_store``; a group that was made by MPI has none.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    try:
        return None if found is None else found()
    except (ValueError, RuntimeError, KeyError):
        return None
