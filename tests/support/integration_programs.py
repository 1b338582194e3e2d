"""A small Llama trained by transformers' own Trainer and by fxpart's; also on rank processes."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from fxpart.errors import FxpartError

VOCABULARY, LENGTH = 96, 12
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
_TIMES = ("runtime", "per_second", "preparation")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; the labels of each row end at another position."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=draw)
        self.ends = torch.randint(4, LENGTH + 1, (rows,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[self.ends[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Heard(TrainerCallback):
    """The names of all events in order."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _listen(name: str) -> Any:
    def on_event(self: Heard, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"{name} {state.global_step}")

    return on_event


for _name in dir(TrainerCallback):
    if _name.startswith("on_"):
        setattr(Heard, _name, _listen(_name))


def make_model(**config: Any) -> LlamaForCausalLM:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, **config}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes))


def shares(prediction: Any) -> dict[str, float]:
    """How often the next token is predicted, and from how many rows."""
    best = prediction.predictions.argmax(-1)[:, :-1]
    return {"hits": float((best == prediction.label_ids[:, 1:]).mean()), "rows": len(best)}


def make_arguments(**changes: Any) -> TrainingArguments:
    """Accumulation with an unequal last batch, clipping, cosine with warmup, evaluation, saving."""
    given = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "optim": "adamw_torch",
        "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "learning_rate": 3e-3,
        "weight_decay": 0.1, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
        "save_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7,
        "save_strategy": "no",
    }  # fmt: skip
    given.setdefault("output_dir", changes.pop("output_dir", None) or tempfile.mkdtemp())
    return TrainingArguments(**{**given, **changes})


def make_trainer(kind: Any, options: dict[str, Any], **changes: Any) -> Any:
    """A trainer of 34 rows, evaluated on 10."""
    return kind(
        **{
            "model": make_model(),
            "args": make_arguments(**changes),
            "train_dataset": Tokens(34),
            "eval_dataset": Tokens(10, seed=1),
            "compute_metrics": shares,
            **options,
        }
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [
        {k: v for k, v in line.items() if not any(part in k for part in _TIMES)}
        for line in trainer.state.log_history
    ]


def weights(trainer: Any) -> list[list[float]]:
    """All parameters as numbers."""
    return [p.detach().flatten().tolist() for p in trainer.model.parameters()]


def distance(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """The largest relative difference of two histories; infinite where they differ in names."""
    if [list(map(sorted, mine))] != [list(map(sorted, theirs))]:
        return math.inf
    return max(
        abs(line[name] - other[name]) / max(abs(other[name]), 1e-6)
        for line, other in zip(mine, theirs, strict=True)
        for name in line
    )


def run_planned(folder: str, options: dict[str, Any], resume: str, changes: dict[str, Any]) -> Any:
    """On a rank: train by a plan; history, weights, the plan's number of ranks, or an error."""
    from fxpart.integrations.transformers import PlannedTrainer

    trainer = make_trainer(PlannedTrainer, options, output_dir=folder, **changes)
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    except FxpartError as failure:
        return failure
    world = trainer.program.plan.world
    trainer.engine.close()
    return history(trainer), weights(trainer), world


def run_even(folder: str, planned: bool) -> Any:
    """On a rank: 32 and 8 rows, of which DistributedDataParallel repeats none."""
    from fxpart.integrations.transformers import PlannedTrainer

    options: dict[str, Any] = {"train_dataset": Tokens(32), "eval_dataset": Tokens(8, seed=1)}
    if planned:
        options |= {"cluster": "local:2", "constraints": {"dp": 2}, "check": "off"}
    trainer = make_trainer(
        PlannedTrainer if planned else transformers.Trainer, options, output_dir=folder
    )
    trainer.train()
    return history(trainer), weights(trainer)


def run_unequal(folder: str) -> Any:
    """On a rank: every rank has other rows."""
    import torch.distributed as dist

    rows = Tokens(34, dist.get_rank())
    return run_planned(folder, {"cluster": "local:2", "train_dataset": rows}, "", {})
