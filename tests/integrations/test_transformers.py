"""The Trainer of transformers by a plan: losses, logs and weights of the plain Trainer."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    pytest.skip("transformers and accelerate are not installed", allow_module_level=True)

import integration_programs as programs
import transformers

from fxpart.errors import FxpartError
from fxpart.integrations.training_arguments import check_training_arguments
from fxpart.integrations.transformers import PlannedTrainer

pytestmark = pytest.mark.slow
TWO_STAGES = {"cluster": "local:2", "constraints": {"stages": 2}, "check": "off"}


@cache
def plain(**changes: Any) -> tuple[list[dict[str, float]], list[list[float]], list[str]]:
    """History, weights and events of the plain Trainer."""
    heard = programs.Heard()
    trainer = programs.make_trainer(transformers.Trainer, {"callbacks": [heard]}, **changes)
    trainer.train()
    return programs.history(trainer), programs.weights(trainer), heard.events


def check_weights(mine: list[list[float]], theirs: list[list[float]], limit: float = 1e-5) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.tensor(one) == pytest.approx(torch.tensor(other), abs=limit)


def check(options: dict[str, Any] | None = None, limit: float = 1e-5, **changes: Any) -> Any:
    """Train by a plan as the plain Trainer; the same logs, events and weights."""
    heard = programs.Heard()
    given = {**TWO_STAGES, **(options or {}), "callbacks": [heard]}
    trainer = programs.make_trainer(PlannedTrainer, given, **changes)
    trainer.train()
    changes.pop("output_dir", None)
    lines, numbers, events = plain(**changes)
    assert programs.distance(programs.history(trainer), lines) < limit
    assert heard.events == events
    check_weights(programs.weights(trainer), numbers, limit)
    return trainer


def test_logs_events_and_weights() -> None:
    """Accumulation, an unequal last batch, clipping, cosine with warmup, metrics, two stages."""
    trainer = check()
    assert trainer.program.plan.world == 2
    assert {"loss", "grad_norm", "learning_rate"} <= set(trainer.state.log_history[0])
    assert any("eval_hits" in line for line in trainer.state.log_history)


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1},
        {"num_train_epochs": 1.4, "dataloader_drop_last": True, "optim": "sgd"},
        {"max_steps": 4, "activation_checkpointing": True, "max_grad_norm": 0.0},
        {"eval_on_start": True, "train_sampling_strategy": "group_by_length"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
         "gradient_accumulation_steps": 1},
        {"optim": "adafactor", "dataloader_num_workers": 1},
        {"optim": "rmsprop", "include_num_input_tokens_seen": "all", "warmup_steps": 0.2},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_arguments(changes: dict[str, Any]) -> None:
    check(**changes)


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    """A learning rate that spoils the model: the checkpoint of step 3 is the best."""
    changes = {"load_best_model_at_end": True, "learning_rate": 0.05, "save_strategy": "steps"}
    trainer = check(output_dir=str(tmp_path), limit=1e-4, **changes)
    assert trainer.state.best_global_step == 3
    before = trainer.evaluate()["eval_loss"]
    loaded = transformers.LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    for mine, theirs in zip(trainer.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert before == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_checkpoints_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    """Either resumes from the checkpoint of the other in the middle, as if not interrupted."""
    _, expected, _ = plain()
    folders = {"plain": tmp_path / "plain", "planned": tmp_path / "planned"}
    for name, kind, options in (
        ("plain", transformers.Trainer, {}),
        ("planned", PlannedTrainer, TWO_STAGES),
    ):
        programs.make_trainer(
            kind, options, output_dir=str(folders[name]), save_strategy="steps"
        ).train()
    for name, kind, options in (
        ("planned", transformers.Trainer, {}),
        ("plain", PlannedTrainer, TWO_STAGES),
        ("planned", PlannedTrainer, {**TWO_STAGES, "constraints": {"tp": 2}}),
    ):
        resumed = programs.make_trainer(kind, options)
        resumed.train(resume_from_checkpoint=str(folders[name] / "checkpoint-3"))
        check_weights(programs.weights(resumed), expected)


def test_dropout_continues_after_a_checkpoint(tmp_path: Path) -> None:
    """The keys of random ops depend on the number of batches, which the checkpoint has."""
    model = {"attention_dropout": 0.3}

    def train(resume: str | None = None) -> list[list[float]]:
        options = {**TWO_STAGES, "model": programs.make_model(**model)}
        trainer = programs.make_trainer(
            PlannedTrainer, options, output_dir=str(tmp_path), save_strategy="steps"
        )
        trainer.train(resume_from_checkpoint=resume)
        return programs.weights(trainer)

    whole = train()
    assert train(str(tmp_path / "checkpoint-3")) == whole


def sum_over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    """The loss of transformers' documentation."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def test_a_loss_function() -> None:
    mine, theirs = (
        programs.make_trainer(kind, {"compute_loss_func": sum_over_items, **options})
        for kind, options in ((PlannedTrainer, TWO_STAGES), (transformers.Trainer, {}))
    )
    assert mine.train().training_loss == pytest.approx(theirs.train().training_loss, rel=1e-5)
    check_weights(programs.weights(mine), programs.weights(theirs))


def classifier() -> Any:
    """A BERT, whose loss ignores ``num_items_in_batch``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=96, num_attention_heads=2, num_labels=3, **sizes, **off)
    )


def test_a_loss_that_ignores_the_number_of_items() -> None:
    """The plain Trainer sums such losses over accumulated batches. The last batch has one row."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(96, (8,), generator=draw), "labels": torch.tensor(index % 3)}
        for index in range(33)
    ]
    options = {"train_dataset": rows, "eval_dataset": rows[:10], "compute_metrics": None}
    planned = {"cluster": "local:2", "constraints": {"mesh": "dp=2"}, "check": "off"}
    mine, theirs = (
        programs.make_trainer(kind, {"model": classifier(), **options, **more})
        for kind, more in ((PlannedTrainer, planned), (transformers.Trainer, {}))
    )
    mine.train()
    theirs.train()
    assert programs.distance(programs.history(mine), programs.history(theirs)) < 1e-5
    check_weights(programs.weights(mine), programs.weights(theirs))


def test_evaluation_alone_prediction_and_a_second_training() -> None:
    mine, theirs = (
        programs.make_trainer(kind, options)
        for kind, options in ((PlannedTrainer, TWO_STAGES), (transformers.Trainer, {}))
    )
    for _ in range(2):
        ours, expected = mine.evaluate(), theirs.evaluate()
        assert ours["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert ours["eval_rows"] == 10
        mine.train()
        theirs.train()
        check_weights(programs.weights(mine), programs.weights(theirs))
    found, known = (t.predict(programs.Tokens(5, 3)) for t in (mine, theirs))
    assert found.predictions == pytest.approx(known.predictions, abs=1e-5)


def test_bfloat16_is_that_of_autocast() -> None:
    trainer = check(limit=0.03, bf16=True)
    assert trainer.program.plan.constraints["precision"] == "bf16"


@pytest.mark.parametrize("constraints", [{"stages": 2}, {"dp": 2, "zero": 2}], ids=str)
def test_two_ranks_train_as_the_plain_trainer(
    pool: Pool, tmp_path: Path, constraints: dict[str, int]
) -> None:
    """Half the rows per device give the same global batch; resumed in the middle, too."""
    lines, expected, _ = plain()
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    options = {**TWO_STAGES, "constraints": constraints}
    run = (str(tmp_path / "run"), options, "", {**sizes, "save_strategy": "steps"})
    for found, numbers, world in pool.run(programs.run_planned, *run):
        assert world == 2
        assert programs.distance(found, lines) < 1e-5
        check_weights(numbers, expected)
    run = (str(tmp_path / "again"), options, str(tmp_path / "run" / "checkpoint-3"), sizes)
    for found, numbers, _ in pool.run(programs.run_planned, *run):
        assert programs.distance(found[:-1], lines[:-1]) < 1e-5  # The last line is of this run.
        check_weights(numbers, expected)


def test_two_ranks_resume_from_the_plain_trainer(pool: Pool, tmp_path: Path) -> None:
    whole = programs.make_trainer(
        transformers.Trainer, {}, output_dir=str(tmp_path), save_strategy="steps"
    )
    whole.train()
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    saved = str(tmp_path / "checkpoint-3")
    run = (str(tmp_path / "again"), TWO_STAGES, saved, sizes)
    for found, numbers, world in pool.run(programs.run_planned, *run):
        assert world == 2
        assert programs.distance(found[:-1], programs.history(whole)[:-1]) < 1e-5
        check_weights(numbers, programs.weights(whole))


def test_two_ranks_train_as_data_parallel_ranks(pool: Pool, tmp_path: Path) -> None:
    """With 32 and 8 rows, of which DistributedDataParallel repeats none."""
    (mine, numbers), *_ = pool.run(programs.run_even, str(tmp_path / "planned"), True)
    (theirs, expected), *_ = pool.run(programs.run_even, str(tmp_path / "plain"), False)
    assert programs.distance(mine, theirs) < 1e-5
    check_weights(numbers, expected)


def test_ranks_with_other_rows_are_refused(pool: Pool, tmp_path: Path) -> None:
    for failure in pool.run(programs.run_unequal, str(tmp_path)):
        assert isinstance(failure, FxpartError) and failure.code == "FXP501"


def test_everything_that_cannot_be_honored_is_refused_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(FxpartError) as caught:
        programs.make_trainer(
            PlannedTrainer,
            TWO_STAGES,
            optim="adalomo",
            neftune_noise_alpha=1.0,
            auto_find_batch_size=True,
            ddp_bucket_cap_mb=25,
            accelerator_config={"split_batches": True},
        )
    assert len(caught.value.problems) == 5
    with pytest.raises(FxpartError, match="micro_batches"):
        programs.make_trainer(PlannedTrainer, {"micro_batches": 2})

    arguments = programs.make_arguments()
    assert arguments.world_size == 1
    torchrun = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(FxpartError, match="started 2 processes"):
        check_training_arguments(arguments)

    class Own(PlannedTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    monkeypatch.undo()
    with pytest.raises(FxpartError, match="compute_loss_func"):
        programs.make_trainer(Own, TWO_STAGES)
