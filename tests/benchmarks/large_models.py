"""What it costs to plan models that no machine at hand could hold.

    python tests/benchmarks/large_models.py

GPT-3 175B, a Llama of 70 billion parameters and a mixture of experts of 10^12 (DeepSeek-V3's 61
layers and 256 experts, with wider ones) on the meta device, in bfloat16, for 1,024 H100 in 128
hosts; 1536 sequences of 2048 tokens, captured with 8 of them. The planner chooses the mesh. Each
model has a process of its own, so that its peak memory is
its own: capture and passes by themselves, then one compile() from the start. CPU seconds, not wall
time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

from record import parser, write

MODELS = ("gpt3-175b", "llama-70b", "moe-1t")
CLUSTER, ROWS, BATCH, LENGTH = "128x8xh100", 8, 1536, 2048


def model(name: str, layers: int = 96) -> Any:
    """The model on the meta device, in training mode. layers: of GPT-3."""
    import torch
    import transformers as hf

    with torch.device("meta"):
        if name == "gpt3-175b":
            made: torch.nn.Module = hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    n_layer=layers, n_embd=12288, n_head=96, n_positions=2048, vocab_size=50257,
                    attn_pdrop=0.0,
                )
            )  # fmt: skip
        elif name == "llama-70b":
            made = hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                    num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
                    max_position_embeddings=8192,
                )
            )  # fmt: skip
        else:
            config = hf.DeepseekV3Config(n_routed_experts=256, moe_intermediate_size=3072)
            made = hf.DeepseekV3ForCausalLM(config)
    return made.bfloat16().train()


def cpu() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str) -> dict[str, Any]:
    """Figures of one model, in this process."""
    import torch
    from fxpart.passes import PREPARE, all_passes

    import fxpart
    from fxpart.capture import capture
    from fxpart.compiler import PassManager

    torch.set_num_threads(1)
    whole = model(name)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    imported = cpu()
    captured = capture(whole, None, batch, batch_size=BATCH)
    traced = cpu()
    PassManager(all_passes()).run(PREPARE, captured.graph)
    start = cpu()
    figures: dict[str, Any] = {
        "model": name,
        "parameters": sum(p.numel() for p in whole.parameters()),
        "import_cpu_seconds": round(imported, 1),
        "capture_cpu_seconds": round(traced - imported, 1),
        "passes_cpu_seconds": round(start - traced, 1),
    }
    try:
        program = fxpart.compile(whole, CLUSTER, example_kwargs=batch, batch_size=BATCH)
    except fxpart.FxpartError as none:
        plan = None
        figures["refused"] = none.code
    else:
        plan = program.plan
    figures["compile_cpu_seconds"] = round(cpu() - start, 1)
    figures["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    if plan is None:
        return figures
    return {
        **figures,
        "devices": len(plan.cluster.devices),
        "mesh": plan.mesh,
        "ops": plan.model.nodes,
        "blocks": plan.model.blocks,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "certificate": plan.certificate.status,
        "gap": plan.certificate.gap,
        "predicted_step_seconds": plan.prediction.step_seconds,
        "problems": len(plan.problems()),
    }


def main() -> None:
    """Measure each model in a process of its own."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", choices=MODELS, help=argparse.SUPPRESS)
    options = options_parser.parse_args()
    if options.only:
        sys.stdout.write(json.dumps(measure(options.only)))
        return
    figures = []
    for name in MODELS:
        command = [sys.executable, __file__, "--only", name]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        figures.append(json.loads(found.stdout))
    del options.only
    write("large_models", figures, options)


if __name__ == "__main__":
    main()
