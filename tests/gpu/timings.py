"""Times, kernels and memory on the device: fxpart beside eager, torch.compile and FSDP2.

    python tests/gpu/check.py --only times:NAME,...

Prints one JSON line per measurement.
"""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from products import products
from training import (
    DEVICE,
    HAS_GPU,
    Job,
    adamw,
    cluster,
    compiled,
    gpt2,
    llama,
    median_seconds,
    synchronize,
    to_device,
    tokens,
)  # fmt: skip

GIB = float(1 << 30)


def llama_job() -> Job:
    """Return a Llama of 0.9 billion parameters in bfloat16, 8,192 tokens."""
    model, vocabulary = llama("large" if HAS_GPU else "tiny", torch.bfloat16, DEVICE)
    return Job(model, tokens(vocabulary, *((4, 2048) if HAS_GPU else (2, 64))))


def gpt2_job() -> Job:
    """Return GPT-2 small in float32 for autocast, 8,192 tokens."""
    model, vocabulary = gpt2("small" if HAS_GPU else "tiny")
    return Job(model, tokens(vocabulary, *((8, 1024) if HAS_GPU else (2, 64))))


def small_job() -> Job:
    """Return a Llama whose kernels are shorter than the time to launch them."""
    model, vocabulary = llama("small" if HAS_GPU else "tiny", torch.bfloat16)
    return Job(model, tokens(vocabulary, *((8, 128) if HAS_GPU else (8, 16))))


JOBS: dict[str, tuple[Callable[[], Job], str | None]] = {
    "llama": (llama_job, None),
    "gpt2": (gpt2_job, "bf16"),
    "small": (small_job, None),
}


def eager_step(
    job: Job, precision: str | None, wrap: Callable[[Any], Any] | None = None
) -> Callable[[], object]:
    """Return one step of a normal loop on a copy of the model."""
    model = copy.deepcopy(job.model).to(DEVICE)
    forward = wrap(model) if wrap is not None else model
    batch, stepper = to_device(job.batch), adamw(model.parameters())

    def step() -> object:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(**batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return loss

    return step


def fsdp(model: Any) -> Any:
    """Shard a model over the one rank with FSDP2, block by block."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if HAS_GPU else "gloo", init_method="tcp://127.0.0.1:29611", rank=0, world_size=1
        )
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def measured(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the median step time and the peak memory of a step."""
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, steps)
    peak = torch.cuda.max_memory_allocated() / GIB if HAS_GPU else 0.0
    reserved = torch.cuda.max_memory_reserved() / GIB if HAS_GPU else 0.0
    return {
        "ms": round(seconds * 1e3, 3),
        "peak_gib": round(peak, 3),
        "reserved": round(reserved, 3),
    }


def speed(name: str, way: str) -> dict[str, Any]:
    """Measure one way to train a job."""
    make, precision = JOBS[name]
    job, steps = make(), 15 if HAS_GPU else 3
    count = sum(p.numel() for p in job.model.parameters())
    rows, length = job.batch["input_ids"].shape
    begin, found = time.perf_counter(), {}
    if way.startswith("fxpart"):
        arguments = {"precision": precision} if precision else {}
        program = compiled(job, 1, microbatches=4 if "4" in way else 1, check="off", **arguments)
        found["compile_s"] = round(time.perf_counter() - begin, 1)
        options = {"compile_stages": True} if "compiled" in way else {}
        options |= {"cuda_graphs": True} if "graphs" in way and HAS_GPU else {}
        trainer = program.trainer(adamw, **options)
        batch = to_device(job.batch) if "device" in way else job.batch
        memory = program.plan.prediction.ranks[0].memory
        found["predicted_ms"] = round(program.plan.prediction.step_seconds * 1e3, 3)
        parts = {k: getattr(memory, k) for k in memory.__struct_fields__}
        found["predicted_gib"] = {
            k: round(v / GIB, 3) for k, v in parts.items() if isinstance(v, (int, float))
        }

        def step() -> object:
            return trainer.step(batch)
    else:
        wrap = {"eager": None, "torch.compile": torch.compile, "fsdp2": fsdp}[way]
        step = eager_step(job, precision, wrap)
    found |= measured(step, steps)
    seconds = found["ms"] / 1e3
    found["tokens_per_s"] = round(rows * length / seconds)
    found["tflops"] = round(6 * count * rows * length / seconds / 1e12, 1)
    return found


def kernels(name: str, way: str) -> dict[str, Any]:
    """Count the kernels, launches and host waits of one step, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    make, precision = JOBS[name]
    job = make()
    if way == "fxpart":
        arguments = {"precision": precision} if precision else {}
        trainer = compiled(job, 1, microbatches=1, check="off", **arguments).trainer(adamw)

        def step() -> object:
            return trainer.step(job.batch)
    else:
        step = eager_step(job, precision)
    for _ in range(3):
        step()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    events = profiler.key_averages()
    counts = {e.key: e.count for e in events}
    device = [e for e in events if e.self_device_time_total > 0 and not e.key.startswith("aten::")]
    longest = sorted(device, key=lambda e: -e.self_device_time_total)
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    host = sorted(events, key=lambda e: -e.self_cpu_time_total)[:12]
    return {
        "device_ms": round(sum(e.self_device_time_total for e in device) / 1e3, 2),
        "kernels": sum(e.count for e in device),
        "launches": sum(counts.get(k, 0) for k in ("cudaLaunchKernel", "cuLaunchKernel",
                        "cudaLaunchKernelExC", "cuLaunchKernelEx")),
        "waits": {k: counts[k] for k in waits if k in counts},
        "items": counts.get("aten::_local_scalar_dense", 0),
        "copies": {k: counts[k] for k in counts if k.startswith("Memcpy")},
        "attention": sorted(k for k in counts if "attention" in k and k.startswith("aten::")),
        "longest": [[round(e.self_device_time_total / 1e3, 2), e.count, e.key[:90]]
                    for e in longest[:12]],
        "host": [[round(e.self_cpu_time_total / 1e3, 2), e.count, e.key[:60]] for e in host],
        "ops": {k: c for k, c in sorted(counts.items(), key=lambda x: -x[1])
                if k.startswith("aten::") and c >= 8},
    }  # fmt: skip


def transfers() -> dict[str, Any]:
    """Time a two-stage pipeline of both ranks in this process."""
    job = small_job()
    one = compiled(job, 1, microbatches=4, check="off").trainer(adamw)
    two = compiled(job, 2, microbatches=4, check="off", constraints={"mesh": "none", "stages": 2})
    both = two.trainer(adamw)
    return {
        "one_rank_ms": median_seconds(lambda: one.step(job.batch), 10) * 1e3,
        "two_ranks_in_process_ms": median_seconds(lambda: both.step(job.batch), 10) * 1e3,
    }


def profiled() -> dict[str, Any]:
    """Profile GPT-2 with the command, and compare its predicted with its measured step time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpu.profile"
        begin = time.perf_counter()
        target = f"{Path(__file__).with_name('target.py')}:workload"
        done = subprocess.run(
            [sys.executable, "-m", "fxpart", "profile", target, "-c", str(cluster()),
             "-o", str(file), "--budget", "20s"],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        found: dict[str, Any] = {"profile_s": round(time.perf_counter() - begin, 1)}
        if done.returncode:
            return {**found, "error": (done.stdout + done.stderr)[-1500:]}
        job = gpt2_job()
        program = compiled(job, 1, microbatches=1, check="off", cost_model=str(file))
        trainer = program.trainer(adamw)
        measured_s = median_seconds(lambda: trainer.step(job.batch), 10)
    predicted = program.plan.prediction.step_seconds
    return {
        **found, "predicted_ms": predicted * 1e3, "measured_ms": measured_s * 1e3,
        "ratio": predicted / measured_s,
    }  # fmt: skip


WAYS = (
    "eager", "fxpart", "fxpart device batch", "fxpart compiled", "fxpart graphs", "torch.compile",
    "fsdp2",
)  # fmt: skip
MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels llama eager": lambda: kernels("llama", "eager"),
    "kernels llama fxpart": lambda: kernels("llama", "fxpart"),
    "kernels gpt2 eager": lambda: kernels("gpt2", "eager"),
    "kernels gpt2 fxpart": lambda: kernels("gpt2", "fxpart"),
    "kernels small eager": lambda: kernels("small", "eager"),
    "kernels small fxpart": lambda: kernels("small", "fxpart"),
    "transfers": transfers,
    "profiled gpt2": profiled,
    **{
        f"{job} {way}": lambda job=job, way=way: speed(job, way)  # type: ignore[misc]
        for job in ("small", "gpt2", "llama") for way in WAYS
    },
    "products": products,
}  # fmt: skip


def run(name: str) -> dict[str, Any]:
    """Take one measurement."""
    begin = time.perf_counter()
    try:
        found = MEASUREMENTS[name]()
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-4:]
        found = {
            "error": f"{type(problem).__name__}: {str(problem)[:600]}",
            "trace": [f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in last],
        }
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    return {"name": name, **found, "seconds": round(time.perf_counter() - begin, 1)}


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*MEASUREMENTS, sep="\n")
    for each in [a for a in sys.argv[1:] if a != "--list"]:
        print("ROW " + json.dumps(run(each)), flush=True)
