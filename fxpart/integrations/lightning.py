"""A strategy of Lightning that trains by a plan.

    trainer = lightning.Trainer(strategy=PlannedStrategy(cluster="local:4"), ...)

``training_step`` is captured once and runs on the stages of the plan. Validation, test and
prediction steps run as they are on the whole module, with the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.integrations.packages import require_package
from fxpart.integrations.planned_module import PlannedModule, check_compile_options

require_package("lightning", "lightning")

from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities import rank_zero_only  # noqa: E402

_REFUSED = ("loss", "precision")


class PlannedStrategy(SingleDeviceStrategy):
    """Trains a LightningModule by a plan, on the ranks of torchrun or in one process.

    Keywords are those of :func:`fxpart.compile`, such as ``cluster``, ``constraints``, ``plan``. A
    batch of the loader is the global batch, on any number of processes. Automatic optimization
    with one optimizer; ``training_step`` returns the loss and may log it, and nothing else.
    """

    strategy_name = "fxpart"

    def __init__(self, **options: Any) -> None:
        """Check the arguments; the module is compiled with the first batch."""
        check_compile_options(options, "PlannedStrategy")
        if wrong := [name for name in _REFUSED if name in options]:
            raise FxpartError(
                Problem(
                    "FXP109", f"PlannedStrategy({name}=)",
                    "training_step computes the loss, and lightning.Trainer has the precision",
                    'leave it out; use Trainer(precision="bf16-mixed") for bfloat16',
                )
                for name in wrong
            )  # fmt: skip
        self._compile_options = options
        self._precision = PlannedPrecision(self)
        super().__init__("cpu")
        launch = read_launch()
        if launch is not None:
            self.global_rank, self.local_rank = launch.rank, launch.local_rank
        rank_zero_only.rank = self.global_rank
        self.planned: PlannedModule | None = None
        self._calls, self._changed = 0, False

    # -- what Lightning asks of a strategy ------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.global_rank == 0

    @property
    def precision_plugin(self) -> PlannedPrecision:
        """The plugin that leaves backward, clipping and update to the plan."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        """Accept float32 and bfloat16 by autocast; FXP109 for others."""
        if given is None or isinstance(given, PlannedPrecision):
            return
        bfloat16 = isinstance(given, MixedPrecision) and given.precision == "bf16-mixed"
        if type(given) is not Precision and not bfloat16:
            raise error(
                "FXP109",
                where=f"Trainer(precision={given.precision!r})",
                why="a plan computes in float32 or under autocast in bfloat16",
                fix='use "32-true" or "bf16-mixed"',
            )
        self._precision.inner = given
        if bfloat16:
            self._compile_options["precision"] = "bf16"

    def setup(self, trainer: Any) -> None:
        """Check the module; plan it with its optimizer."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if self.optimizers and (not module.automatic_optimization or len(self.optimizers) > 1):
            raise error(
                "FXP109",
                where=f"{type(module).__name__}.configure_optimizers",
                why="a plan updates all parameters with one optimizer, automatically",
                fix="return one optimizer, with parameter groups, and use automatic optimization",
            )
        self._calls = 0
        self.planned = PlannedModule(TrainingStep(module), self._compile_options)

    def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
        """Run forward and backward of a batch by the plan; return its loss."""
        planned = self._get_planned()
        (optimizer,) = self.optimizers
        if planned.optimizer is not optimizer:
            planned.set_optimizer(optimizer, self._calls)
        loss = planned.backward((batch,), weight=1.0).detach()
        # Lightning clears gradients between the step and its backward; they exist already.
        optimizer.zero_grad = _keep_gradients
        assert isinstance(planned.module, TrainingStep)
        planned.module.log_loss(loss)
        return loss

    def update(self, batches: int) -> None:
        """Update with the sum of the accumulated gradients divided by ``batches``."""
        self._get_planned().update(total=float(batches))
        self._changed = True

    def write_weights(self) -> None:
        """Write the trained weights into the module; collective."""
        if self._changed:
            self._get_planned().write_weights()
            self._changed = False

    def on_validation_start(self) -> None:
        """Validate the trained weights."""
        self.write_weights()

    on_test_start = on_predict_start = on_train_end = on_validation_start

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the trained weights; collective."""
        self.write_weights()
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as the optimizer itself has it; collective."""
        planned = self._get_planned()
        if planned.optimizer is None:
            found: dict[str, Any] = super().optimizer_state(optimizer)
            return found
        return {**planned.optimizer_state_dict(), "fxpart": {"calls": planned.get_calls()}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the module, and into the ranks of the plan."""
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.planned is not None:
            self.planned.read_weights()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of this or of another strategy."""
        self._get_planned().set_optimizer(None)
        (state,) = checkpoint["optimizer_states"]
        self._calls = int(state.get("fxpart", {}).get("calls", 0))
        super().load_optimizer_state_dict(checkpoint)

    def teardown(self) -> None:
        """Close the plan's trainer; after a failure without calls to other ranks."""
        planned, module = self.planned, self.lightning_module
        if planned is not None and planned.trainer is not None:
            if module is not None and module._trainer is not None and module.trainer.interrupted:
                planned.trainer.close()
                planned.trainer = None
            else:
                planned.release()
        for optimizer in self.optimizers:
            vars(optimizer).pop("zero_grad", None)
        super().teardown()

    def _get_planned(self) -> PlannedModule:
        assert self.planned is not None, "setup() comes first"
        return self.planned


class TrainingStep(nn.Module):
    """``training_step`` of a LightningModule as a module that returns its loss."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss; record what the step logs."""
        logged: list[tuple[str, Any, dict[str, Any]]] = []

        def log(name: str, value: Any, *_: Any, **options: Any) -> None:
            logged.append((name, value, options))

        with _replace(self.module, "log", log):
            found = self.module.training_step(batch, 0)
        loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
        _RECORDS[id(self)] = [
            (name, options) if value is loss else name for name, value, options in logged
        ]
        return loss

    def log_loss(self, loss: torch.Tensor) -> None:
        """Log the loss under its names; FXP109 if the step logs other values."""
        records = _RECORDS.get(id(self), [])
        other = [each for each in records if isinstance(each, str)]
        if other:
            raise error(
                "FXP109",
                where=f"{type(self.module).__name__}.training_step logs {', '.join(other)}",
                why="only the loss leaves the stages in training",
                fix="log the returned loss alone in training_step, and other values in "
                "validation_step",
            )
        for name, options in records:
            self.module.log(name, loss, **options)


# By the identity of a TrainingStep, which must not change while it is captured.
_RECORDS: dict[int, list[Any]] = {}


class PlannedPrecision(Precision):
    """Leaves backward, clipping and update to the plan.

    inner: the plugin of the Trainer's precision, for validation.
    """

    def __init__(self, strategy: PlannedStrategy) -> None:
        self.inner: Precision | None = None
        self._strategy = strategy

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of steps that the plan does not run."""
        found: AbstractContextManager[None] = (
            nullcontext() if self.inner is None else self.inner.forward_context()
        )
        return found

    def backward(self, tensor: Any, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the training step has computed the gradients."""

    def clip_gradients(
        self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip at the update."""
        norm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "norm"
        planned, limit = self._strategy.planned, float(clip_val or 0.0) or None
        assert planned is not None
        planned.clip_gradients(limit if norm else None, None if norm else limit)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **_: Any
    ) -> Any:
        """Run the training step of ``closure``, and update."""
        found = self._wrap_closure(model, optimizer, closure)
        if found is not None:
            self._strategy.update(model.trainer.accumulate_grad_batches)
        return found


def _keep_gradients(set_to_none: bool = True) -> None:
    """Do nothing: the update starts the next gradients from zero."""


@contextmanager
def _replace(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a method of a module."""
    vars(module)[name] = value
    try:
        yield
    finally:
        del vars(module)[name]
