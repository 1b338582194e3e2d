"""Plans of the whole space beside plans of the space before it was widened, for twelve pairs.

    python tests/benchmarks/spaces.py             (--only NAME for one; --resume keeps other rows)

The narrower space has equal data, tensor and pipeline degrees, ZeRO, 1F1B, and recomputation of
whole blocks or none: no experts or sequences over ranks, no other schedules, no selective
recomputation, no replicated stages. Both plans are priced by one cost model, from data sheets. A
plan of the whole space that is slower fails the benchmark. A sentence names the parts of the step
that differ most. Each pair has a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experts import LLAMA_8B, LLAMA_70B, Expert, build, explain, gpt
from record import parser, resumed, write

NARROW = {"schedule": "1f1b", "cp": 1, "ep": 1, "recompute": "none,full", "copies": "none"}
Made = tuple[Any, dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """A model with its batch, and a cluster. rows: of the global batch."""

    make: Callable[[], Made]
    cluster: str
    rows: int


def language(given: Expert) -> Callable[[], Made]:
    """A GPT or Llama of the experts' benchmark."""
    return lambda: (build(given), tokens(given.length))


def mixture(layers: int, length: int) -> Callable[[], Made]:
    """A Mixtral with layers as in 8x7B."""

    def make() -> Made:
        import torch
        from transformers import MixtralConfig, MixtralForCausalLM

        with torch.device("meta"):
            model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers))
        return model.bfloat16().train(), tokens(length)

    return make


def translation() -> Made:
    """T5 large, 512 tokens to 512."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        config = T5Config(
            d_model=1024,
            d_ff=4096,
            d_kv=64,
            num_layers=24,
            num_heads=16,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    return model.bfloat16().train(), tokens(512)


def vision() -> Made:
    """ViT large on images of 224 x 224."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device("meta"):
        config = ViTConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
            num_labels=1000,
        )  # fmt: skip
        model = ViTForImageClassification(config)
        pixels = torch.zeros(8, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(8, dtype=torch.int64)
    return model.bfloat16().train(), {"pixel_values": pixels, "labels": labels}


def tokens(length: int) -> dict[str, Any]:
    """Token ids that are their own labels."""
    import torch

    ids = torch.zeros(8, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def llama(shape: tuple[int, int, int, int, int], length: int) -> Callable[[], Made]:
    """A Llama with sequences of a length."""
    return language(Expert("", shape, "", 0, length))


PAIRS: dict[str, Pair] = {
    "gpt-1.7b, 32 A100": Pair(language(gpt(2304, 24, 24, 4, 512, stages=1)), "4x8xa100", 512),
    "gpt-7.5b, 16 A100": Pair(language(gpt(4096, 36, 32, 2, 128, stages=1)), "2x8xa100", 128),
    "llama-8b, 8 H100": Pair(llama(LLAMA_8B, 8192), "8xh100", 16),
    "llama-8b, 32,768 tokens, 8 H100": Pair(llama(LLAMA_8B, 32768), "8xh100", 8),
    "llama-8b, 131,072 tokens, 32 H100": Pair(llama(LLAMA_8B, 131072), "4x8xh100", 8),
    "llama-8b, 8 L40S": Pair(llama(LLAMA_8B, 2048), "8xl40s", 64),
    "llama-70b, 64 H100": Pair(llama(LLAMA_70B, 8192), "8x8xh100", 256),
    "mixtral-8x7b, 64 H100": Pair(mixture(32, 4096), "8x8xh100", 512),
    "mixtral-8x7b of 8 layers, 8 H100": Pair(mixture(8, 4096), "8xh100", 64),
    "t5-large, 4 A100 and 4 V100": Pair(translation, "4xa100-40gb+4xv100-32gb", 64),
    "vit-large, 8 A10G": Pair(vision, "8xa10g", 256),
    "gpt-1.7b, 2 A100 and 4 T4": Pair(
        language(gpt(2304, 24, 24, 4, 32, stages=1)), "2xa100+4xt4", 32
    ),
}


def measure(name: str) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    import fxpart

    torch.set_num_threads(1)
    pair = PAIRS[name]
    begin = time.process_time()
    model, batch = pair.make()
    program = fxpart.compile(model, pair.cluster, example_kwargs=batch, batch_size=pair.rows)
    whole, spent = program.plan, time.process_time() - begin
    row = {
        "pair": name, "cluster": pair.cluster, "rows": pair.rows,
        "whole": describe_layout(whole), "whole_seconds": whole.prediction.step_seconds,
        "planning_cpu_seconds": round(spent, 1),
    }  # fmt: skip
    try:
        narrow = program.replan(pair.cluster, constraints=NARROW).plan
    except fxpart.FxpartError as fault:
        return {**row, "refused": f"{fault.code}: {fault.problems[0].why.splitlines()[0]}"}
    seconds = narrow.prediction.step_seconds
    return {
        **row,
        "narrow": describe_layout(narrow), "narrow_seconds": seconds,
        "gain": seconds / whole.prediction.step_seconds - 1,
        "difference": explain(whole, narrow),
    }  # fmt: skip


def describe_layout(plan: Any) -> str:
    """The layout as `fxpart explain` has it, with microbatches and schedule."""
    from fxpart.plan.summary import layout

    layouts = dict.fromkeys(layout(stage) for stage in plan.stages)
    text = f"{len(plan.stages)} x " if len(plan.stages) > 1 else ""
    text += ", ".join("one rank" if one == "-" else one for one in layouts)
    return f"{text}, {plan.microbatches} microbatches, {plan.schedule}"


def main() -> None:
    """Measure each pair in a process of its own."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--only", choices=list(PAIRS), action="append")
    options_parser.add_argument("--here", action="store_true", help="one pair, in this process")
    options_parser.add_argument("--resume", action="store_true", help="keep rows that there are")
    options = options_parser.parse_args()
    names = options.only or list(PAIRS)
    if options.here:
        sys.stdout.write(json.dumps(measure(names[0])))
        return
    rows: list[dict[str, Any]] = resumed("spaces", options, {"rows": []})["rows"]
    for name in names:
        if any(row["pair"] == name for row in rows):
            continue
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), "--here", "--only", name],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        sys.stderr.write(f"{json.dumps(rows[-1], indent=1)}\n")
        write("spaces", {"rows": rows}, options)
    slower = [row["pair"] for row in rows if row.get("gain", 0) < -1e-9]
    if slower:
        sys.exit(f"slower in the whole space: {', '.join(slower)}")


if __name__ == "__main__":
    main()
