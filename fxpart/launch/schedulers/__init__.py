"""Jobs for the schedulers of clusters: SLURM, Kubernetes and Ray; torchrun stays the launcher.

`SCHEDULERS` has one entry for each; ``fxpart launch`` has an option for each entry.
"""

from __future__ import annotations

from fxpart.launch.schedulers.job_description import JobDescription, SchedulerSpec
from fxpart.launch.schedulers.kubernetes import KUBERNETES
from fxpart.launch.schedulers.ray_train import RAY
from fxpart.launch.schedulers.slurm import SLURM

__all__ = ["SCHEDULERS", "JobDescription", "SchedulerSpec"]

SCHEDULERS: dict[str, SchedulerSpec] = {spec.name: spec for spec in (SLURM, KUBERNETES, RAY)}
