"""One rank of pipelines over NCCL under torchrun: each schedule on the same process group.

    torchrun --nproc-per-node 2 tests/gpu/nccl_ranks.py

If the ranks share a GPU, each pretends to be a host of its own (NCCL_HOSTID), as NCCL connects two
ranks of a host only over two GPUs. Transfers then go over sockets: right, but slow.
"""

from __future__ import annotations

import json
import os
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SCHEDULES = ("1f1b", "zb-v", "interleaved", "async")
STEPS = 4


def main() -> None:
    """Train by each schedule; rank 0 prints a row for each."""
    import torch
    import torch.distributed as dist
    from training import HAS_GPU, Job, adamw, compiled, llama, relative, tokens, train_eager

    from fxpart.runtime.transport import process_group

    if HAS_GPU and torch.cuda.device_count() < WORLD:
        os.environ |= {"NCCL_HOSTID": f"host{RANK}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_IB_DISABLE": "1"}
        process_group.check_distinct_gpus = lambda exchange: None  # type: ignore[assignment]
        os.environ["LOCAL_RANK"] = "0"
    if HAS_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for schedule in SCHEDULES:
        model, vocabulary = llama("small")
        job = Job(model, tokens(vocabulary, 8, 128))
        whole = train_eager(job, STEPS)[0]
        given: dict[str, object] = {"mesh": "none"}
        if schedule == "1f1b":
            given |= {"schedule": schedule, "stages": WORLD}
        elif schedule != "async":
            given |= {"schedule": schedule}
            given |= {"virtual": 2} if schedule == "interleaved" else {}
        mode = {"mode": "async"} if schedule == "async" else {}
        program = compiled(job, WORLD, microbatches=4, constraints=given, **mode)
        begin = time.perf_counter()
        trainer = program.trainer(adamw, timeout=20.0)
        found = [trainer.step(job.batch) for _ in range(STEPS)]
        trainer.state_dict()  # Flushes an asynchronous pipeline.
        took = time.perf_counter() - begin
        losses = [float(loss) for loss in found if loss is not None]
        # The weights of an asynchronous pipeline are older: here only its end counts.
        off = 0.0 if schedule == "async" else relative(losses, whole)
        trainer.close()
        if RANK == 0:
            row = {"name": f"nccl {schedule} {WORLD}", "losses": losses, "difference": off,
                   "seconds": round(took, 2), "passed": off < 1e-3}  # fmt: skip
            print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
