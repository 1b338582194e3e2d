"""The workload that the GPU checks profile."""

from __future__ import annotations

from timings import JOBS

import fxpart


def workload() -> fxpart.Workload:
    """Return GPT-2 small."""
    job = JOBS["gpt2"][0]()
    return fxpart.Workload(job.model, example=job.batch, batch_size=len(job.batch["input_ids"]))
