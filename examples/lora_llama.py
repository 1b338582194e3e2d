"""Fine-tune a Llama with LoRA adapters by a plan, with the Trainer of transformers.

The weights are random, so nothing is downloaded; ``from_pretrained`` takes their place. Only the
adapter is trained and saved, in the format of peft. ``python examples/lora_llama.py`` runs two
pipeline stages in one process, ``torchrun --nproc-per-node 2 examples/lora_llama.py`` on two.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from fxpart.integrations.transformers import PlannedTrainer

WORDS, LENGTH = 64, 24
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))  # Of torchrun.


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on by a fixed step from a random start; the step is to be learnt."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(WORDS, (rows, 1), generator=draw)
        self.tokens = (starts + 5 * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def base_model() -> LlamaForCausalLM:
    """Return a Llama with random weights from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hits(prediction: Any) -> dict[str, float]:
    """Return how often the next token is predicted."""
    found = prediction.predictions.argmax(-1)[:, :-1]
    return {"hits": float((found == prediction.label_ids[:, 1:]).mean())}


def main(steps: int, out: str) -> tuple[dict[str, float], PeftModel]:
    """Train an adapter; return the last evaluation, and the adapter as peft reads it."""
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    model = get_peft_model(
        base_model(), LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM")
    )
    trainer = PlannedTrainer(
        model=model,
        args=TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=16 // PROCESSES,
            learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=0.1, logging_steps=20,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=Counting(512, seed=0),
        eval_dataset=Counting(64, seed=1),
        compute_metrics=hits,
        cluster="local:2",
        constraints={"stages": 2},
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(out)
    print(trainer.program)
    print({name: round(value, 3) for name, value in found.items() if "hits" in name})
    return found, PeftModel.from_pretrained(base_model(), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", default="lora-out")
    given = parser.parse_args()
    main(given.steps, given.out)
