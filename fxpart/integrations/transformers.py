"""A ``transformers.Trainer`` that trains by a plan.

The loop is that of transformers: epochs, logging, evaluation, saving, callbacks. Forward, backward
and update of a batch run by the plan. Checkpoints have the format of the plain Trainer.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fxpart.errors import error
from fxpart.integrations.global_batch_accelerator import LoopAccelerator
from fxpart.integrations.packages import require_methods, require_package
from fxpart.integrations.planned_module import PlannedModule, check_compile_options
from fxpart.integrations.training_arguments import (
    check_training_arguments,
    disable_checkpointing,
    get_recompute,
)
from fxpart.runtime.trainer import Trainer

require_package("transformers")

import transformers  # noqa: E402
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME  # noqa: E402
from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402

# Methods that PlannedTrainer overrides or calls.
_METHODS = (
    "_build_accelerator_args", "_clip_grad_norm", "_finalize_training", "_get_grad_norm",
    "_get_num_items_in_batch", "_load_best_model", "_maybe_log_save_evaluate",
    "_move_model_to_device", "_save_optimizer_and_scheduler", "_wrap_model",
    "create_accelerator_and_postprocess", "floating_point_ops", "prediction_step",
)  # fmt: skip
require_methods(transformers.Trainer, _METHODS, "transformers")

TARGETS = "target_labels"  # The model takes "labels" itself.
_OWN = tuple(inspect.signature(transformers.Trainer.__init__).parameters)[1:]


class PlannedTrainer(transformers.Trainer):
    """Trains a Hugging Face model by a plan with the usual TrainingArguments.

    Arguments are those of ``transformers.Trainer``, and keywords of :func:`fxpart.compile` such as
    ``cluster``, ``constraints`` and ``plan``. The global batch has ``per_device_train_batch_size``
    rows per process; the plan decides which rank computes which. A TrainingArguments field that a
    plan cannot honor raises FXP109 or FXP115. ``model`` gets the trained weights when the
    trainer saves (on rank 0), when training ends, and by :meth:`write_weights`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Check the arguments; the model is compiled with the first batch."""
        given = {name: options.pop(name) for name in list(options) if name not in _OWN}
        check_compile_options(given, "PlannedTrainer", _OWN)
        bound = inspect.signature(transformers.Trainer.__init__).bind(self, *arguments, **options)
        args = bound.arguments.get("args") or transformers.TrainingArguments("tmp_trainer")
        bound.arguments["args"] = args
        check_training_arguments(args)
        if type(self).compute_loss is not PlannedTrainer.compute_loss:
            raise error(
                "FXP109",
                where=f"{type(self).__name__}.compute_loss",
                why="the plan computes the loss, so an overridden compute_loss is not called",
                fix="pass compute_loss_func=, or a model that returns its loss",
            )
        self._compile_options = given
        self._planned: PlannedModule | None = None
        self._position = PlanPosition()
        self._sums_batches: bool | None = None
        args._n_gpu = min(args.n_gpu, 1)  # transformers would use DataParallel.
        super().__init__(*bound.args[1:], **bound.kwargs)
        self.add_callback(self._position)

    # -- the plan -------------------------------------------------------------------------------

    @property
    def engine(self) -> Trainer | None:
        """The trainer of the plan; None before the first batch."""
        return None if self._planned is None else self._planned.trainer

    @property
    def program(self) -> Any:
        """The compiled program; None before the first batch."""
        return None if self._planned is None else self._planned.program

    def write_weights(self, *, first_only: bool = False) -> None:
        """Write the trained weights into ``model``; collective. first_only: on rank 0 only."""
        if self._planned is not None:
            adapters = hasattr(self.model, "peft_config")
            self._planned.write_weights(first_only=first_only, trainable_only=adapters)

    def _plan(self) -> PlannedModule:
        """Return the planned model, with the optimizer of the current training."""
        if self._planned is None or self._planned.module is not self.model:
            if self._planned is not None:
                self._planned.release()
            self._planned = PlannedModule(
                self.model, self._list_compile_options(), self._list_trainer_options
            )
        if self.is_in_train and self._planned.optimizer is not self.optimizer:
            self._planned.set_optimizer(self.optimizer, self._position.calls)
        return self._planned

    def _list_compile_options(self) -> dict[str, Any]:
        options = {"seed": self.args.seed, **self._compile_options}
        if self.args.bf16:
            options.setdefault("precision", "bf16")
        if self.compute_loss_func is not None:
            options.setdefault("loss", partial(_call_loss, self.compute_loss_func))
        elif self.label_smoother is not None:
            options.setdefault("loss", partial(_smooth, self.label_smoother, self._shifts_labels()))
        return options

    def _list_trainer_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.args.max_grad_norm:
            options["clip_norm"] = self.args.max_grad_norm
        else:
            options["log_grad_norm"] = True
        if get_recompute(self.args):
            options["recompute"] = "full"
        if self.args.torch_compile:
            options["compile_stages"] = self.args.torch_compile_backend or True
        return options

    def _shifts_labels(self) -> bool:
        """Return whether plain label smoothing shifts the labels of this model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model = self.model
        inner = model.base_model.model if hasattr(model, "peft_config") else model
        return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # -- training -------------------------------------------------------------------------------

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as the plain Trainer; arguments and result are its own."""
        if self._planned is not None:
            self._planned.release()
            self._planned.set_optimizer(None)
        self._position.calls = 0
        with disable_checkpointing(self.args):
            return super().train(*arguments, **options)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of a batch; return its share of the update's loss."""
        batch = dict(self._prepare_inputs(inputs))
        weight, share = None, 1.0
        sums = False
        if self.args.gradient_accumulation_steps > 1:
            weight, share = 1.0, 1.0 / self.current_gradient_accumulation_steps
            sums = num_items_in_batch is not None and self._ignores_items(batch)
            if sums:
                share = 1.0
            elif num_items_in_batch is not None:
                weight = float(self._get_num_items_in_batch([batch], self.args.device))
                share = weight / float(num_items_in_batch)
        plan = self._plan()
        model.train()
        loss = plan.backward(self._name_targets(batch), weight)
        assert plan.trainer is not None
        plan.trainer.step_total = 1.0 if sums else None
        self._position.calls = plan.trainer.calls
        return loss.detach().to(self.args.device) * share

    def _ignores_items(self, batch: dict[str, Any]) -> bool:
        """Return whether the loss of the model is a mean whatever ``num_items_in_batch`` is.

        The plain Trainer then does not average over accumulated batches. Found once, on one row.
        """
        if self._sums_batches is None:
            self._sums_batches = False
            if self.compute_loss_func is None and self.label_smoother is None:
                row = {k: v[:1] if torch.is_tensor(v) else v for k, v in batch.items()}
                self._sums_batches = _has_constant_loss(self.model, row)
        return self._sums_batches

    def _name_targets(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with labels under the name that a loss outside the model reads."""
        if self.compute_loss_func is None and self.label_smoother is None:
            return batch
        return {TARGETS if name == "labels" else name: value for name, value in batch.items()}

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        """Raise FXP109: each trial would need a plan."""
        raise error(
            "FXP109",
            where="PlannedTrainer.hyperparameter_search",
            why="each trial has other batches and needs another plan",
            fix="create a PlannedTrainer for each trial",
        )

    def create_accelerator_and_postprocess(self) -> None:
        """Use an accelerator that gives every rank the global batch."""
        super().create_accelerator_and_postprocess()
        self.accelerator = LoopAccelerator(**self._accelerator_arguments)
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """Keep the arguments, to create another accelerator with them."""
        built: dict[str, Any] = super()._build_accelerator_args(**options)
        self._accelerator_arguments = built
        return built

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing: the plan places each stage."""

    def _wrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Return the model: the plan divides it."""
        return model

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: the update clips by ``max_grad_norm``."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Do nothing: :meth:`_maybe_log_save_evaluate` passes the norm of the update."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *arguments: Any, **options: Any
    ) -> None:
        """Log with the gradient norm that the update has computed."""
        norm = None if self.engine is None else self.engine.last_grad_norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *arguments, **options)

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this process's share of the operations of the global batch."""
        return float(super().floating_point_ops(inputs)) / int(self.args.world_size)

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        """Write the weights into the model before the callbacks of the end."""
        self.write_weights()
        return super()._finalize_training(*arguments, **options)

    # -- evaluation -----------------------------------------------------------------------------

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, outputs and labels of a global batch, equal on every rank.

        The loss is repeated for each process, which makes its weight the rows of the batch.
        """
        batch = dict(self._prepare_inputs(inputs))
        has_labels = bool(self.label_names) and all(
            batch.get(name) is not None for name in self.label_names
        )
        labels = None
        if has_labels or (not self.label_names and self.can_return_loss):
            found = tuple(batch.get(name) for name in self.label_names)
            labels = found[0] if len(found) == 1 else found
            batch = self._name_targets(batch)
            if prediction_loss_only:
                return self._repeat(self._plan().eval_step(batch)), None, None
            loss, outputs = self._plan().predict_with_loss(batch)
            loss = None if loss is None else self._repeat(loss)
        else:
            loss, outputs = None, self._plan().predict(batch)
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", [])
        return loss, _list_logits(outputs, [*ignore_keys, "loss"], has_labels), labels

    def _repeat(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.detach().to(self.args.device).expand(self.args.world_size)

    # -- saving ---------------------------------------------------------------------------------

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Write the weights into the model on rank 0, and save as the plain Trainer; collective."""
        self.write_weights(first_only=True)
        with _restore_configs(self.model):
            super().save_model(*arguments, **options)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # Then every rank can read the files.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both in the plain Trainer's files."""
        state = self._plan().optimizer_state_dict(first_only=True)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_best_model(self) -> None:
        """Load the best weights into the model, and from there into the plan's ranks."""
        super()._load_best_model()
        if self._planned is not None:
            self._planned.read_weights()


class PlanPosition(TrainerCallback, ExportableState):
    """Saves in trainer_state.json what the keys of random ops depend on.

    calls: training batches so far.
    """

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def state(self) -> dict[str, Any]:
        """Return the saved state."""
        return {"args": {"calls": self.calls}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue after the batches of the checkpoint."""
        found = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.calls = int((found[0] if isinstance(found, list) else found)["args"]["calls"])


def _has_constant_loss(model: Any, batch: dict[str, Any]) -> bool:
    """Return whether the loss of a batch is the same for two values of ``num_items_in_batch``."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            one, other = (
                model(**batch, num_items_in_batch=torch.tensor(items)) for items in (1, 1000)
            )
        one, other = (o["loss"] if isinstance(o, Mapping) else o[0] for o in (one, other))
        return bool(torch.isfinite(one)) and bool(torch.equal(one, other)) and bool(one != 0)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _restore_configs(model: Any) -> Iterator[None]:
    """Undo what ``save_pretrained`` writes into configs that the captured program has read."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    kept = {key: dict(vars(c)) for key, c in configs.items() if hasattr(c, "__dict__")}
    try:
        yield
    finally:
        for key, values in kept.items():
            vars(configs[key]).clear()
            vars(configs[key]).update(values)


def _list_logits(outputs: Any, ignored: list[str], has_loss: bool) -> Any:
    """Return the outputs as the plain Trainer does: a tensor or a tuple, without the loss."""
    if isinstance(outputs, Mapping):
        found = tuple(value for name, value in outputs.items() if name not in ignored)
    elif isinstance(outputs, (tuple, list)):
        found = tuple(outputs[1:] if has_loss else outputs)
    else:
        return outputs
    return found[0] if len(found) == 1 else found


def _call_loss(function: Any, outputs: Any, target_labels: torch.Tensor) -> Any:
    """Return the mean loss of ``compute_loss_func``; batches are weighted by their items."""
    return function(outputs, target_labels, num_items_in_batch=None)


def _smooth(smoother: Any, shift_labels: bool, outputs: Any, target_labels: torch.Tensor) -> Any:
    """Return the label-smoothed loss."""
    return smoother(outputs, target_labels, shift_labels=shift_labels)
