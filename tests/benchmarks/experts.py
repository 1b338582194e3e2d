"""Plans beside the layouts that experts published, under the same costs.

    python tests/benchmarks/experts.py             (--only NAME for one; --list)

Each model is built on the meta device and planned freely, then once more with the published
degrees, stages, ZeRO level, schedule and recomputation fixed; microbatches are free, as most
sources print none. Both step times are of one cost model, from data sheets. A free plan that is
slower fails the benchmark. A sentence names the parts of the step that differ most. Each model has
a process of its own; CPU seconds are counted.

Sources: Megatron-LM, table 1 (Narayanan et al., SC'21); Llama 3 (Dubey et al. 2024, table 4);
torchtitan (Liang et al. 2024, tables 1 to 4); MegaScale (Jiang et al. 2024).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import parser, write

VOCABULARY = 51200


@dataclass(frozen=True)
class Expert:
    """A model, a cluster and the published layout. shape: hidden, layers, heads, key-value heads
    and width of the MLP; the latter two are 0 for a GPT."""

    source: str
    shape: tuple[int, int, int, int, int]
    cluster: str
    batch: int
    length: int
    layout: dict[str, int | str] = field(default_factory=dict)


def gpt(hidden: int, layers: int, heads: int, hosts: int, batch: int, **layout: Any) -> Expert:
    """A row of Megatron-LM's table 1: sequences of 2,048, A100 of 80 GB in hosts of eight."""
    layout |= {"zero": 0, "recompute": "full"}
    layout |= {"schedule": "1f1b"} if layout["stages"] > 1 else {}
    return Expert(
        "Megatron-LM",
        (hidden, layers, heads, 0, 0),
        f"{hosts}x8xa100-sxm-80gb",
        batch,
        2048,
        layout,
    )


LLAMA_8B = (4096, 32, 32, 8, 14336)
LLAMA_70B = (8192, 80, 64, 8, 28672)
LLAMA_405B = (16384, 126, 128, 8, 53248)

# dp is what tensor degrees and stages leave of the devices.
EXPERTS: dict[str, Expert] = {
    "gpt-1.7b": gpt(2304, 24, 24, 4, 512, tp=1, stages=1, dp=32),
    "gpt-3.6b": gpt(3072, 30, 32, 8, 512, tp=2, stages=1, dp=32),
    "gpt-7.5b": gpt(4096, 36, 32, 16, 512, tp=4, stages=1, dp=32),
    "gpt-18.4b": gpt(6144, 40, 48, 32, 1024, tp=8, stages=1, dp=32),
    "gpt-39.1b": gpt(8192, 48, 64, 64, 1536, tp=8, stages=2, dp=32),
    "gpt-76.1b": gpt(10240, 60, 80, 128, 1792, tp=8, stages=4, dp=32),
    "gpt-145.6b": gpt(12288, 80, 96, 192, 2304, tp=8, stages=8, dp=24),
    "gpt-310.1b": gpt(16384, 96, 128, 240, 2160, tp=8, stages=16, dp=15),
    "gpt-529.6b": gpt(20480, 105, 128, 315, 2520, tp=8, stages=35, dp=9),
    "gpt-1008b": gpt(25600, 128, 160, 384, 3072, tp=8, stages=64, dp=6),
    "llama-8b": Expert("torchtitan", LLAMA_8B, "1x8xh100", 16, 8192,
                       {"tp": 1, "stages": 1, "dp": 8, "zero": 3, "recompute": "selective"}),
    "llama-8b-128": Expert("torchtitan", LLAMA_8B, "16x8xh100", 256, 8192,
                           {"tp": 1, "stages": 1, "dp": 128, "zero": 3, "recompute": "selective"}),
    "llama-70b": Expert("torchtitan", LLAMA_70B, "32x8xh100", 512, 8192,
                        {"tp": 8, "stages": 1, "dp": 32, "zero": 3, "recompute": "full"}),
    "llama-405b": Expert("Llama 3", LLAMA_405B, "1024x8xh100", 1024, 8192,
                         {"tp": 8, "stages": 16, "dp": 64, "zero": 2, "schedule": "interleaved"}),
    "gpt-175b": Expert("MegaScale", (12288, 96, 96, 0, 0), "128x8xa100-sxm-80gb", 768, 2048,
                       {"tp": 8, "stages": 8, "dp": 16, "zero": 2, "schedule": "interleaved"}),
}  # fmt: skip


def build(expert: Expert) -> Any:
    """The model on the meta device, in bfloat16 and training mode."""
    import torch
    import transformers as hf

    hidden, layers, heads, keys, width = expert.shape
    with torch.device("meta"):
        if keys:
            made: torch.nn.Module = hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=keys, vocab_size=128256,
                    max_position_embeddings=expert.length,
                )
            )  # fmt: skip
        else:
            made = hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    n_layer=layers, n_embd=hidden, n_head=heads, n_positions=expert.length,
                    vocab_size=VOCABULARY, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
                )
            )  # fmt: skip
    return made.bfloat16().train()


def describe(plan: Any) -> str:
    """The layout in words."""
    from collections import Counter

    stage = plan.stages[0]
    modes = Counter(one.recompute for one in plan.stages if one.recompute != "none")
    again = ", ".join(f"{count} of {len(plan.stages)} recompute {m}" for m, count in modes.items())
    parts = (
        f"tensor {stage.tensor_parallel}", f"data {stage.data_parallel}",
        f"{len(plan.firsts)} stages" if len(plan.firsts) > 1 else "no pipeline",
        f"ZeRO {stage.zero}" if stage.zero else "", f"{plan.microbatches} microbatches",
        plan.schedule if len(plan.firsts) > 1 else "", again,
    )  # fmt: skip
    return ", ".join(part for part in parts if part)


def parts_of(plan: Any) -> dict[str, float]:
    """Seconds of a step by cause, on the bottleneck stage."""
    from fxpart.plan.prediction import step_parts
    from fxpart.report.explanation_builder import share_of_fill

    found = plan.prediction
    share = share_of_fill(plan)
    return step_parts(found.ranks, plan.microbatches, share, found.step_seconds).named()


def explain(free: Any, theirs: Any) -> str:
    """What the plan does otherwise, and what it gains and pays."""
    mine, other = parts_of(free), parts_of(theirs)
    gains = {name: other[name] - mine[name] for name in mine}
    most, least = max(gains, key=lambda n: gains[n]), min(gains, key=lambda n: gains[n])
    if describe(free) == describe(theirs):
        return "The same layout."
    text = f"{describe(free)} instead of {describe(theirs)}: "
    text += f"{most} {mine[most]:.3g} s instead of {other[most]:.3g} s"
    if gains[least] < 0:
        text += f", for {least} {mine[least]:.3g} s instead of {other[least]:.3g} s"
    return text + "."


def measure(name: str) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    import fxpart

    torch.set_num_threads(1)
    expert = EXPERTS[name]
    ids = torch.zeros(8, expert.length, dtype=torch.int64, device="meta")
    begin = time.process_time()

    def plan(**constraints: Any) -> Any:
        return fxpart.compile(
            build(expert), expert.cluster, example_kwargs={"input_ids": ids, "labels": ids},
            batch_size=expert.batch, constraints=constraints,
        ).plan  # fmt: skip

    free = plan()
    spent = time.process_time() - begin
    row = {
        "model": name, "source": expert.source, "cluster": expert.cluster,
        "plan": describe(free), "plan_seconds": free.prediction.step_seconds,
        "certificate": free.certificate.status, "gap": free.certificate.gap,
        "degrees_gap": None if free.degrees is None else free.degrees.gap,
        "planning_cpu_seconds": round(spent, 1),
    }  # fmt: skip
    try:
        theirs = plan(**expert.layout)
    except fxpart.FxpartError as fault:
        return {**row, "refused": f"{fault.code}: {fault.problems[0].why.splitlines()[0]}"}
    seconds = theirs.prediction.step_seconds
    return {
        **row,
        "published": describe(theirs), "published_seconds": seconds,
        "plan_over_published": free.prediction.step_seconds / seconds,
        "difference": explain(free, theirs),
    }  # fmt: skip


def main() -> None:
    """Measure each model in a process of its own."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", choices=list(EXPERTS), action="append")
    options_parser.add_argument("--here", action="store_true", help="one model, in this process")
    options = options_parser.parse_args()
    names = options.only or list(EXPERTS)
    if options.here:
        sys.stdout.write(json.dumps(measure(names[0])))
        return
    rows = []
    for name in names:
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), "--here", "--only", name],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        sys.stderr.write(f"{json.dumps(rows[-1], indent=1)}\n")
    write("experts", rows, options)
    slower = [row["model"] for row in rows if row.get("plan_over_published", 0) > 1 + 1e-9]
    if slower:
        sys.exit(f"slower than published: {', '.join(slower)}")


if __name__ == "__main__":
    main()
