"""An ``accelerate.Accelerator`` whose model is trained by a plan.

The loop stays that of the script. ``model(**batch)`` runs forward and backward of the pipeline,
because stages do not wait for each other in between; ``accelerator.backward(loss)`` confirms it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.integrations.global_batch_accelerator import GlobalBatchAccelerator
from fxpart.integrations.packages import require_package
from fxpart.integrations.planned_module import PlannedModule, check_compile_options

require_package("accelerate")

import accelerate  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

_OWN = tuple(inspect.signature(accelerate.Accelerator.__init__).parameters)[1:]
# Arguments of Accelerator that a plan replaces.
_REFUSED = (
    "deepspeed_plugin", "deepspeed_plugins", "dynamo_backend", "dynamo_plugin", "fsdp_plugin",
    "megatron_lm_plugin", "parallelism_config", "split_batches", "torch_tp_plugin",
)  # fmt: skip


class PlannedAccelerator(GlobalBatchAccelerator):
    """Prepares a model that is trained by a plan.

    Arguments are those of ``accelerate.Accelerator``, and keywords of :func:`fxpart.compile` such
    as ``cluster``, ``constraints`` and ``loss``. The loader's batch size is that of each process,
    as with accelerate; each rank gets the global batch. With ``loss=`` the targets are passed to
    the model, which returns the loss.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Check the arguments; the model is compiled with the first batch."""
        given = {name: options.pop(name) for name in list(options) if name not in _OWN}
        check_compile_options(given, "PlannedAccelerator", _OWN)
        _check_accelerator_options(options)
        super().__init__(*arguments, **options)
        if self.mixed_precision not in ("no", "bf16"):
            raise error(
                "FXP109",
                where=f"PlannedAccelerator(mixed_precision={self.mixed_precision!r})",
                why="a plan computes in float32 or under autocast in bfloat16",
                fix='use "bf16" or "no"',
            )
        launch = read_launch()
        if launch is not None and launch.world != self.num_processes:
            raise error(
                "FXP109",
                where="PlannedAccelerator()",
                why=f"the launcher has started {launch.world} processes, and accelerate uses "
                f"{self.num_processes} on this device",
                fix="pass cpu=True to train on CPUs",
            )
        if self.mixed_precision == "bf16":
            given.setdefault("precision", "bf16")
        self._compile_options = given

    @property
    def planned(self) -> PlannedModule | None:
        """The planned model; None before a model is prepared."""
        return self._models[0].planned if self._models else None

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return a module that runs the plan; FXP109 for a second model."""
        if isinstance(model, ModelProxy):
            return model
        if self._models:
            raise error(
                "FXP109",
                where="PlannedAccelerator.prepare(model)",
                why="it has prepared another model, and a plan is for one model",
                fix="prepare the other model by an accelerate.Accelerator, if it is not trained",
            )
        made = ModelProxy(PlannedModule(model, self._compile_options), self)
        self._models.append(made)
        return made

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return an optimizer whose step is the trainer's update; FXP109 for a second one."""
        if isinstance(optimizer, PlannedOptimizer):
            return optimizer
        if self._optimizers:
            raise error(
                "FXP109",
                where="PlannedAccelerator.prepare(optimizer)",
                why="it has prepared another optimizer, and a trainer has one",
                fix="use parameter groups of one optimizer",
            )
        made = PlannedOptimizer(optimizer, self)
        self._optimizers.append(made)
        return made

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Confirm the gradients of ``loss``; FXP109 if it is not the model's last loss itself."""
        model = self._models[0] if self._models else None
        if model is None or loss is not model.pending:
            raise error(
                "FXP109",
                where="PlannedAccelerator.backward(loss)",
                why="it is not the loss of the last call of the model, whose gradients exist: it "
                "was computed from the outputs, scaled, or used before",
                fix="pass loss= to PlannedAccelerator and the targets to the model, and pass the "
                "loss that the model returns",
            )
        model.pending = None

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip at the update; return the norm, which has its value after ``optimizer.step()``."""
        if norm_type != 2:
            raise error(
                "FXP109", where=f"clip_grad_norm_(norm_type={norm_type})",
                why="a trainer clips by the 2-norm of all gradients", fix="leave it out",
            )  # fmt: skip
        return self._optimizers[0].clip(norm=max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the elements of all gradients at the update."""
        self._optimizers[0].clip(value=clip_value)

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Return the model itself with the trained weights; collective."""
        if not isinstance(model, ModelProxy):
            return model
        model.planned.write_weights()
        return model.planned.module


class ModelProxy(nn.Module):
    """A module that runs a plan when it is called.

    pending: the loss of the last training batch, until ``accelerator.backward``.
    """

    planned: PlannedModule
    _accelerator: PlannedAccelerator

    def __init__(self, planned: PlannedModule, accelerator: PlannedAccelerator) -> None:
        super().__init__()
        self.module = planned.module
        self.pending: torch.Tensor | None = None
        object.__setattr__(self, "planned", planned)
        object.__setattr__(self, "_accelerator", accelerator)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Train on a batch in training mode; else evaluate it, or predict without targets."""
        batch: Any = inputs or arguments
        if arguments and inputs:
            batch = (*arguments, inputs)
        planned = self.planned
        if self.training and torch.is_grad_enabled():
            self._begin()
            loss = planned.backward(batch, weight=1.0).detach()
            self.pending = loss
            return loss if self._has_own_loss else TrainingOutputs(loss)
        if self._has_own_loss:
            targets = planned.has_targets(batch)
            return planned.eval_step(batch) if targets else planned.predict(batch)
        evaluated, outputs = planned.predict_with_loss(batch)
        if evaluated is not None and hasattr(outputs, "loss"):
            outputs.loss = evaluated
        return outputs

    @property
    def _has_own_loss(self) -> bool:
        return self._accelerator._compile_options.get("loss") is not None

    def _begin(self) -> None:
        """Check that the last loss was used, and use the prepared optimizer."""
        self.check_used()
        optimizers = self._accelerator._optimizers
        if not optimizers:
            raise error(
                "FXP109",
                where="the prepared model",
                why="it is called in training mode, and no optimizer was prepared",
                fix="pass the optimizer to accelerator.prepare, too, or call model.eval()",
            )
        if self.planned.optimizer is None:
            self.planned.set_optimizer(optimizers[0].optimizer, optimizers[0].calls)

    def check_used(self) -> None:
        """Raise FXP109 if ``accelerator.backward`` was not called with the last loss."""
        if self.pending is not None:
            raise error(
                "FXP109",
                where="the prepared model",
                why="accelerator.backward was not called with the loss of its last call, whose "
                "gradients are accumulated",
                fix="call accelerator.backward(loss), or the model under torch.no_grad in "
                "evaluation mode",
            )

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the trained weights by the names of the model; collective."""
        trainer = self.planned.trainer
        return self.module.state_dict() if trainer is None else trainer.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the model, and into the ranks of the plan; collective."""
        found = self.module.load_state_dict(state_dict, strict, assign)
        self.planned.read_weights()
        return found


class TrainingOutputs(Mapping[str, torch.Tensor]):
    """The loss of a training batch; stages keep the other outputs."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Return the loss; FXP109 for another output."""
        if key in ("loss", 0):
            return self.loss
        raise self._refuse(key)

    def __getattr__(self, name: str) -> Any:
        """Raise FXP109 for another output."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refuse(name)

    def __iter__(self) -> Any:
        """Iterate over the names."""
        return iter(("loss",))

    def __len__(self) -> int:
        """Return the number of outputs."""
        return 1

    def _refuse(self, name: Any) -> FxpartError:
        return error(
            "FXP109",
            where=f"outputs[{name!r}] of a training batch",
            why="only the loss leaves the stages in training; forward and backward have ended",
            fix="pass loss= to PlannedAccelerator to compute another loss, or call model.eval()",
        )


class PlannedOptimizer(AcceleratedOptimizer):
    """The optimizer of a prepared model; its state is that of the ranks.

    calls: training batches before the state that was loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: PlannedAccelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self.calls = 0
        self._accelerator = accelerator
        self._norm: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:
        """Update with the mean of the accumulated batches, as accelerate divides their losses."""
        planned = self._accelerator.planned
        if planned is None or planned.trainer is None:
            raise error(
                "FXP109", where="optimizer.step()", why="the model was not called before",
                fix="call model(**batch) and accelerator.backward(loss) first",
            )  # fmt: skip
        if closure is not None:
            self.optimizer.step(closure)  # Raises FXP115.
        self._accelerator._models[0].check_used()
        if not self.gradient_state.sync_gradients:
            return
        planned.update(total=float(self._accelerator.gradient_accumulation_steps))
        if self._norm is not None and planned.trainer.last_grad_norm is not None:
            self._norm.copy_(planned.trainer.last_grad_norm)
        self._norm = None
        planned.clip_gradients()

    def clip(self, norm: float | None = None, value: float | None = None) -> torch.Tensor:
        """Clip at the next update; return the norm of the gradients, not a number before it."""
        found = torch.full((), float("nan"))
        planned = self._accelerator.planned
        if planned is not None and self.gradient_state.sync_gradients:
            planned.clip_gradients(norm, value)
            self._norm = found
        return found

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are accumulated."""
        planned = self._accelerator.planned
        if self.gradient_state.sync_gradients and planned is not None:
            if planned.trainer is not None:
                planned.trainer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as the optimizer itself has it; collective."""
        planned = self._accelerator.planned
        if planned is None or planned.optimizer is None:
            own: dict[str, Any] = self.optimizer.state_dict()
            return own
        return {**planned.optimizer_state_dict(), "fxpart": {"calls": planned.get_calls()}}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of this or of a plain optimizer; collective."""
        self.calls = int(state_dict.get("fxpart", {}).get("calls", 0))
        planned = self._accelerator.planned
        if planned is not None:
            planned.set_optimizer(None)
        self.optimizer.load_state_dict(state_dict)


def _check_accelerator_options(options: Mapping[str, Any]) -> None:
    """Raise FXP109 for each argument that a plan replaces."""
    wrong = [name for name in _REFUSED if options.get(name)]
    if wrong:
        raise FxpartError(
            Problem(
                "FXP109", f"PlannedAccelerator({name}=)",
                "the plan decides how the model and the batch are divided, and how stages run",
                "leave it out; pass constraints= or plan= instead",
            )
            for name in wrong
        )  # fmt: skip
