"""Jobs for SLURM, Kubernetes and Ray: read and run by what reads and runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from cli_calls import call
from sample_plans import plan as sample_plan

from fxpart.errors import FxpartError
from fxpart.launch.schedulers import SCHEDULERS, JobDescription

AWKWARD = ("train.py", "--name", 'it\'s a "b" $HOME', "*", "--lr=1e-3")

# Fields of the operator's types with the JSON kind of each, from pytorch_types.go and
# common_types.go of kubeflow/training-operator v1.9; the pod is Kubernetes' own.
SPEC: dict[str, Any] = {
    "nprocPerNode": str,
    "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int, "activeDeadlineSeconds": int,
                  "ttlSecondsAfterFinished": int},
    "elasticPolicy": {"rdzvBackend": str, "rdzvId": str, "rdzvPort": int, "rdzvHost": str,
                      "minReplicas": int, "maxReplicas": int, "maxRestarts": int,
                      "standalone": bool},
    "pytorchReplicaSpecs": {"Worker": {"replicas": int, "restartPolicy": str, "template": dict}},
}  # fmt: skip


def job(**more: Any) -> JobDescription:
    return JobDescription(**{"program": AWKWARD, "nodes": 2, "devices": 4, **more})


def write(scheduler: str, **more: Any) -> str:
    return SCHEDULERS[scheduler].write(job(**more).check())


def shim(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_sbatch_script_runs_torchrun_with_the_programs_arguments(tmp_path: Path) -> None:
    """Run by bash, with srun and torchrun in place of SLURM's: each argument arrives unchanged."""
    script = tmp_path / "job.sbatch"
    script.write_text(write("slurm", folder=f"{tmp_path}/my run", hours="1-02:00:00", cpus=8))
    shims = tmp_path / "bin"
    shims.mkdir()
    shim(shims, "scontrol", "seq -f node%.0f 7 100000")  # more than a pipe holds
    shim(shims, "srun", 'shift; exec "$@"')
    shim(shims, "torchrun", 'printf "%s\\0" "$@"')
    environment = {"PATH": f"{shims}:{os.environ['PATH']}", "SLURM_JOB_ID": "5",
                   "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}  # fmt: skip
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    arguments = done.stdout.split("\0")[:-1]
    assert tuple(arguments[-len(AWKWARD):]) == AWKWARD  # fmt: skip
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "4", 3)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == (
        "c10d", "node7:29500", "5",
    )  # fmt: skip
    assert parsed.training_script == "train.py"
    assert (tmp_path / "my run/logs").is_dir()
    heads = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --gpus-per-node=4" in heads and "#SBATCH --time=1-02:00:00" in heads
    assert "#SBATCH --requeue" in heads and "#SBATCH --cpus-per-task=8" in heads


def test_sbatch_accepts_the_script(tmp_path: Path) -> None:
    """SLURM's own check, where a controller answers."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        pytest.skip("SLURM is not installed")
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, check=False)
    if ping.returncode:
        pytest.skip("no SLURM controller answers")
    script = tmp_path / "job.sbatch"
    script.write_text(write("slurm", nodes=1, gpus=False, devices=1, folder=str(tmp_path)))
    done = subprocess.run(
        ["sbatch", "--test-only", str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def check_fields(found: Mapping[str, Any], allowed: Mapping[str, Any], where: str) -> None:
    for name, value in found.items():
        assert name in allowed, f"{where}.{name}"
        if isinstance(allowed[name], dict):
            check_fields(value, allowed[name], f"{where}.{name}")
        else:
            assert type(value) is allowed[name], f"{where}.{name}"


def test_pytorch_job_has_the_operators_fields() -> None:
    yaml = pytest.importorskip("yaml")
    text = write(
        "kubernetes", image="registry/train:1", claim="data", folder="/runs", hours="02:00:00",
        options=("namespace=team",), cpus=16,
    )  # fmt: skip
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert found["metadata"] == {"name": "fxpart", "namespace": "team"}
    spec = found["spec"]
    check_fields(spec, SPEC, "spec")
    assert spec["nprocPerNode"] == "4" and spec["runPolicy"]["activeDeadlineSeconds"] == 7200
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert worker["replicas"] == 2 and container["name"] == "pytorch"
    assert container["command"] == ["torchrun", *AWKWARD]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": 16}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_ray_script_runs_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ray's classes replaced: they get the sizes, and a worker runs the program as main."""
    given: dict[str, Any] = {}

    def record(name: str) -> Any:
        return lambda **options: given.setdefault(name, options)

    class TorchTrainer:
        def __init__(self, loop: Any, **options: Any) -> None:
            self.loop = loop

        def fit(self) -> None:
            os.chdir("/")  # as Ray does on its workers
            self.loop()

    ray, train, torch_part = (ModuleType(n) for n in ("ray", "ray.train", "ray.train.torch"))
    vars(ray)["init"] = record("init")
    vars(train).update({n: record(n) for n in ("FailureConfig", "RunConfig", "ScalingConfig")})
    vars(torch_part).update(TorchConfig=record("TorchConfig"), TorchTrainer=TorchTrainer)
    for module in (ray, train, torch_part):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["job_ray.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import json, sys\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps([__name__, sys.argv[1:]]))\n"
    )
    text = write("ray", gpus=False, restarts=2)
    exec(compile(text, "job_ray.py", "exec"), {"__name__": "__main__"})
    assert json.loads((tmp_path / "seen").read_text()) == ["__main__", list(AWKWARD[1:])]
    assert Path.cwd() == tmp_path
    assert given["ScalingConfig"] == {
        "num_workers": 8, "use_gpu": False, "resources_per_worker": {"CPU": 1.0},
        "placement_strategy": "PACK",
    }  # fmt: skip
    assert given["FailureConfig"] == {"max_failures": 2}
    assert given["TorchConfig"] == {"backend": "gloo"}


@pytest.mark.parametrize(
    ("scheduler", "more", "why"),
    [
        ("slurm", {"name": "My Run"}, "lower-case"),
        ("slurm", {"hours": "two"}, "not a duration"),
        ("slurm", {"options": ("partition",)}, "NAME=VALUE"),
        ("slurm", {"options": ("comment=a\n#SBATCH --uid=0",)}, "NAME=VALUE"),
        ("slurm", {"folder": "a\nb"}, "name of a folder"),
        ("kubernetes", {}, "No container image"),
        ("kubernetes", {"image": "x", "claim": "data", "folder": "runs"}, "not absolute"),
        ("kubernetes", {"image": "x", "options": ("queue=a",)}, "only the option namespace"),
        ("ray", {"options": ("a=b",)}, "no such options"),
    ],
)
def test_wrong_jobs_are_refused(scheduler: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError) as refused:
        write(scheduler, **more)
    assert refused.value.code == "FXP109" and why in str(refused.value)


def test_command_takes_sizes_from_the_plan_and_submits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shim(tmp_path, "sbatch", 'echo "Submitted batch job 7 of $1"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = sample_plan(4)
    plan.dump("plan.json")
    out, _ = call(
        capsys, "launch", "--slurm", "--plan", "plan.json", "--submit", "--json", "--",
        "train.py", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert (found["nodes"], found["devices"]) == (1, 4)
    assert found["submitted"] == "Submitted batch job 7 of job.sbatch"
    text = Path("job.sbatch").read_text()
    assert "--gpus" not in text and text.endswith("train.py --json\n")
    assert Path("runs/fxpart").is_dir()
    call(capsys, "launch", "--ray", "--run", "other", "--", "train.py")
    assert not Path("other").exists()
    _, err = call(capsys, "launch", "--slurm", "--run", "/proc/x", "--", "train.py", status=4)
    assert "FXP603" in err
    shim(tmp_path, "sbatch", "echo no such partition >&2; exit 1")
    _, err = call(capsys, "launch", "--slurm", "--submit", "--", "train.py", status=2)
    assert "no such partition" in err
    _, err = call(capsys, "launch", "--", "train.py", status=2)
    assert "--slurm, --kubernetes, --ray" in err
    _, err = call(capsys, "launch", "--slurm", "--plan", "plan.json", "--nodes", "2", "--",
                  "train.py", status=2)  # fmt: skip
    assert "FXP502" in err
    monkeypatch.setenv("PATH", "/nowhere")
    _, err = call(capsys, "launch", "--ray", "--submit", "--", "train.py", status=4)
    assert "FXP601" in err
    _, err = call(capsys, "launch", "--ray", "-o", "/proc/none", "--", "train.py", status=4)
    assert "FXP603" in err


def test_nodes_with_different_numbers_of_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample_plan(3)
    devices = tuple(
        msgspec.structs.replace(device, host=f"host{min(k, 1)}")
        for k, device in enumerate(plan.cluster.devices)
    )
    cluster = msgspec.structs.replace(plan.cluster, devices=devices)
    moved = msgspec.structs.replace(plan, cluster=cluster, cluster_hash=cluster.hash)
    moved.dump(tmp_path / "plan.json")
    _, err = call(
        capsys, "launch", "--slurm", "--plan", str(tmp_path / "plan.json"), "--", "x.py", status=2
    )
    assert "different numbers of ranks (host0: 1, host1: 2)" in err
