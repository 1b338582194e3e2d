"""Times of single kernels on the device: products, attention, copies, reductions, launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from training import synchronize

GIB = float(1 << 30)


def products() -> dict[str, Any]:
    """Measure matrix products, attention, copies, reductions and launches."""
    rows: list[Any] = []

    def timed(label: str, run: Callable[[], object], work: float, unit: str) -> None:
        try:
            for _ in range(3):
                run()
            synchronize()
            repeats = 3
            while True:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                for _ in range(repeats):
                    run()
                last.record()
                last.synchronize()
                total = first.elapsed_time(last)
                if total > 8 or repeats > 2000:
                    break
                repeats *= 4
            seconds = total / repeats / 1e3
            rows.append([label, seconds, work / seconds, unit])
        except Exception as problem:
            rows.append([label, None, None, str(problem)[:80]])

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    shapes = [
        (m, n, k)
        for m in (256, 1024, 2048, 4096, 8192, 16384)
        for n, k in (
            (768, 768),
            (2048, 2048),
            (4096, 4096),
            (11008, 4096),
            (4096, 11008),
            (32000, 4096),
        )
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for m, n, k in shapes if dtype is torch.bfloat16 else shapes[::4]:
            a, b = empty(m, k, dtype=dtype), empty(n, k, dtype=dtype)
            timed(f"linear {dtype} {m}x{n}x{k}", lambda: torch.nn.functional.linear(a, b),
                  2.0 * m * n * k, "flop/s")  # fmt: skip
    for heads, groups, length, dim, batch in (
        (16, 8, 2048, 128, 4), (32, 8, 4096, 128, 1), (12, 12, 1024, 64, 8), (8, 8, 128, 32, 8),
    ):  # fmt: skip
        q = empty(batch, heads, length, dim).requires_grad_()
        k = empty(batch, groups, length, dim).requires_grad_()
        v = empty(batch, groups, length, dim).requires_grad_()
        grouped = {"enable_gqa": True} if heads != groups else {}

        def attention() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, **grouped
            )

        work = 4.0 * batch * heads * length * length * dim / 2
        timed(
            f"attention forward b{batch} h{heads}/{groups} s{length} d{dim}",
            attention,
            work,
            "flop/s",
        )
        out = attention()
        grad = torch.randn_like(out)
        timed(
            f"attention backward b{batch} h{heads}/{groups} s{length} d{dim}",
            lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
            2.5 * work, "flop/s",
        )  # fmt: skip
    for mib in (1, 16, 256):
        a = torch.empty(mib << 18, device="cuda")
        b = torch.empty_like(a)
        timed(f"copy {mib} MiB", lambda: b.copy_(a), 2 * a.numel() * 4, "B/s")
        timed(f"add {mib} MiB", lambda: torch.add(a, b, out=b), 3 * a.numel() * 4, "B/s")
        host = torch.empty(mib << 18, pin_memory=True)
        timed(
            f"pinned to device {mib} MiB",
            lambda: a.copy_(host, non_blocking=True),
            a.numel() * 4,
            "B/s",
        )
        timed(
            f"device to pinned {mib} MiB",
            lambda: host.copy_(a, non_blocking=True),
            a.numel() * 4,
            "B/s",
        )
    tiny = torch.zeros(16, device="cuda")
    timed("tiny kernel", lambda: tiny.add_(1), 1.0, "1/s")
    x = empty(8192, 2048).requires_grad_()
    w = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    timed("rms_norm 8192x2048", lambda: torch.rms_norm(x, (2048,), w), 4.0 * x.numel(), "B/s")
    timed(
        "layer_norm 8192x2048",
        lambda: torch.nn.functional.layer_norm(x, (2048,), w),
        4.0 * x.numel(),
        "B/s",
    )
    timed("softmax 8192x2048", lambda: x.softmax(-1), 4.0 * x.numel(), "B/s")
    logits = empty(8192, 32000)
    labels = torch.randint(32000, (8192,), device="cuda")
    timed(
        "cross_entropy 8192x32000",
        lambda: torch.nn.functional.cross_entropy(logits, labels),
        2.0 * logits.numel(),
        "B/s",
    )
    table = empty(32000, 2048)
    timed(
        "embedding 8192 of 32000x2048",
        lambda: torch.nn.functional.embedding(labels, table),
        4.0 * 8192 * 2048,
        "B/s",
    )
    for fused in (False, True):
        parameters = [torch.nn.Parameter(empty(2048, 2048)) for _ in range(64)]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        stepper = torch.optim.AdamW(parameters, fused=fused)
        timed(
            f"adamw fused={fused} 64 x 2048x2048 bfloat16",
            stepper.step,
            14.0 * 64 * 2048 * 2048,
            "B/s",
        )
    begin = time.perf_counter()
    for _ in range(5000):
        tiny.add_(1)
    host_us = (time.perf_counter() - begin) / 5000 * 1e6
    synchronize()
    info = torch.cuda.mem_get_info()
    return {"rows": rows, "host_us_per_op": host_us, "context_gib": (info[1] - info[0]) / GIB}
