"""Accelerators that give every rank the whole global batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fxpart.integrations.global_batches import merge_batches
from fxpart.integrations.packages import require_package

require_package("accelerate")

import accelerate  # noqa: E402
from accelerate.data_loader import prepare_data_loader  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402


class GlobalBatchAccelerator(accelerate.Accelerator):
    """Gives every rank the whole global batch, so that results need not be gathered."""

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Return the loader of global batches: the rows that all processes would read."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        placed = self.device_placement if device_placement is None else device_placement
        made = prepare_data_loader(
            merge_batches(data_loader, self.num_processes),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=placed,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(made)
        return made

    def gather(self, tensor: Any) -> Any:
        """Return the tensors, which are those of the global batch already."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data without what exceeds the rows of the last batch."""
        state = self.gradient_state
        rows = state.remainder if state.end_of_dataloader else 0
        if rows <= 0:
            return input_data
        try:
            return recursively_apply(lambda t: t[:rows], input_data, error_on_other_type=True)
        except TypeError:
            return input_data[:rows]

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return the tensor: it has the same size on every rank."""
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensor times ``scale``: it is that of the global batch already."""
        return recursively_apply(lambda t: t * scale, tensor)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Return a context without effect: gradients are reduced at the update."""
        return nullcontext()


class LoopAccelerator(GlobalBatchAccelerator):
    """For a tool that owns the loop: models and optimizers stay as they are."""

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Return the model, which the plan divides."""
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return the instance, whose step is the trainer's update."""
        return optimizer
