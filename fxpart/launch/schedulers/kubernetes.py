"""Kubernetes: a PyTorchJob of Kubeflow's training operator.

Source: kubeflow/training-operator v1.9, pkg/apis/kubeflow.org/v1/pytorch_types.go and
common_types.go. The operator sets the variables PET_* from which torchrun reads the rendezvous.
"""

from __future__ import annotations

import json
from typing import Any

from fxpart.errors import error
from fxpart.launch.schedulers.job_description import JobDescription, SchedulerSpec

_CONTAINER = "pytorch"  # the operator requires this name
_SHARED = "shared-memory"
_RUN = "run"
_GPU = "nvidia.com/gpu"


def write_pytorch_job(job: JobDescription) -> str:
    """Return the job as JSON, which is YAML, too; FXP109 without an image."""
    if not job.image:
        raise error(
            "FXP109", where="fxpart launch --kubernetes", why="No container image is given.",
            fix="Pass --image with torch, fxpart and the program in it.",
        )  # fmt: skip
    if job.claim and not job.folder.startswith("/"):
        raise error(
            "FXP109", where=f"--run {job.folder}",
            why="The volume of --claim is mounted there, and the path is not absolute.",
            fix="Pass --run /runs.",
        )  # fmt: skip
    metadata: dict[str, Any] = {"name": job.name}
    options = dict(job.list_options())
    if "namespace" in options:
        metadata["namespace"] = options.pop("namespace")
    if options:
        raise error(
            "FXP109", where=f"--set {next(iter(options))}",
            why="A PyTorchJob has only the option namespace here.",
            fix="Edit the written file for others.",
        )  # fmt: skip
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": job.restarts}
    if job.seconds is not None:
        policy["activeDeadlineSeconds"] = job.seconds
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(job.devices),
            "runPolicy": policy,
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": job.name,
                "rdzvPort": job.port,
                "minReplicas": job.nodes,
                "maxReplicas": job.nodes,
                "maxRestarts": job.restarts,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": job.nodes,
                    "restartPolicy": "OnFailure" if job.restarts else "Never",
                    "template": {"spec": _make_pod(job)},
                }
            },
        },
    }
    return _format(manifest)


def _make_pod(job: JobDescription) -> dict[str, Any]:
    """Return the pod: the program under torchrun, with shared memory and the run's folder."""
    limits: dict[str, Any] = {_GPU: job.devices} if job.gpus else {}
    if job.cpus:
        limits["cpu"] = job.cpus
    mounts = [{"name": _SHARED, "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": _SHARED, "emptyDir": {"medium": "Memory"}}]
    if job.claim:
        mounts.append({"name": _RUN, "mountPath": job.folder})
        volumes.append({"name": _RUN, "persistentVolumeClaim": {"claimName": job.claim}})
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "command": ["torchrun", *job.program],
        "volumeMounts": mounts,
    }
    if limits:
        container["resources"] = {"limits": limits}
    return {"containers": [container], "volumes": volumes}


def _format(value: Any, depth: int = 0) -> str:
    """Return block YAML; texts are quoted as in JSON."""
    pad = "  " * depth
    lines = []
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, dict | list) and item:
                lines.append(f"{pad}{_key(name)}:\n{_format(item, depth + 1)}")
            else:
                lines.append(f"{pad}{_key(name)}: {json.dumps(item)}\n")
        return "".join(lines)
    for item in value:
        if isinstance(item, dict):
            text = _format(item, depth + 1)
            lines.append(f"{pad}- {text[len(pad) + 2 :]}")
        else:
            lines.append(f"{pad}- {json.dumps(item)}\n")
    return "".join(lines)


def _key(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name)


KUBERNETES = SchedulerSpec(
    name="kubernetes",
    file="job.yaml",
    summary="a PyTorchJob of Kubeflow's training operator",
    write=write_pytorch_job,
    submit=lambda path: ("kubectl", "apply", "-f", path),
)
