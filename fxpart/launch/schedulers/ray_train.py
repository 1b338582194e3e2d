"""Ray: a script that runs the program on the workers of a TorchTrainer.

Ray Train starts the processes and their process group instead of torchrun; fxpart uses the group
that it finds. Source: Ray 2.60, ray.train.torch.TorchTrainer, ray.train.ScalingConfig, RunConfig
and FailureConfig.
"""

from __future__ import annotations

from pathlib import PurePath

from fxpart.errors import error
from fxpart.launch.schedulers.job_description import JobDescription, SchedulerSpec

_SCRIPT = '''"""Written by `fxpart launch --ray`."""

import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

PROGRAM = {program!r}
ARGUMENTS = {arguments!r}
FOLDER = {folder!r}
START = os.getcwd()


def train() -> None:
    """Run the program on this worker, as one rank, where the job was submitted from.

    Ray changes the directory of its workers, and adds the job's working directory to sys.path.
    """
    name = PROGRAM[-1]
    places = [place for place in (START, *sys.path) if os.path.isdir(place)]
    found = [place for place in places if os.path.isfile(os.path.join(place, name))]
    os.chdir(next(iter((*found, *places))))
    sys.path.insert(0, os.path.dirname(os.path.abspath(name)) if found else os.getcwd())
    sys.argv = [name, *ARGUMENTS]
    if PROGRAM[0] == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    ray.init(address="auto")
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig(
            num_workers={workers}, use_gpu={gpus}, resources_per_worker={resources!r},
            placement_strategy={strategy!r},
        ),
        run_config=RunConfig(
            name={name!r}, storage_path=os.path.abspath(FOLDER),
            failure_config=FailureConfig(max_failures={restarts}),
        ),
    ).fit()
'''


def write_ray_script(job: JobDescription) -> str:
    """Return the script; FXP109 for options, which Ray has none of."""
    if job.options:
        raise error(
            "FXP109", where=f"--set {job.options[0]}", why="Ray has no such options.",
            fix="Edit the written script.",
        )  # fmt: skip
    count = 2 if job.program[0] == "-m" else 1
    program, arguments = list(job.program[:count]), list(job.program[count:])
    resources: dict[str, float] = {"CPU": float(job.cpus or 1)}
    if job.gpus:
        resources["GPU"] = 1.0
    return _SCRIPT.format(
        program=program if count == 2 else [str(PurePath(program[0]))],
        folder=job.folder,
        arguments=arguments,
        backend="nccl" if job.gpus else "gloo",
        workers=job.nodes * job.devices,
        gpus=job.gpus,
        resources=resources,
        strategy="PACK",
        name=job.name,
        restarts=job.restarts,
    )


RAY = SchedulerSpec(
    name="ray",
    file="job_ray.py",
    summary="a script for Ray Train",
    write=write_ray_script,
    submit=lambda path: ("ray", "job", "submit", "--working-dir", ".", "--", "python", path),
)
