"""Error feedback for updates that are one step late: two-buffer weights (PipeDream-2BW).

With u_t the optimizer's whole update (learning rate and decoupled decay included) from the gradient
at the weights x_t, a pipeline with delay 1 computes x_{t+1} = x_t - u_{t-1}. What it should have
applied, u_t, is known one update later; the difference is then added, with strength b:

    x_{t+1} = x_t - u_{t-1} - b (u_{t-1} - u_{t-2})

For b = 1, z_t = x_{t+1} + u_{t-1} is trained without feedback, z_{t+1} = z_t - u_t, and x_{t+1} =
z_t + (z_t - z_{t-1}) are its weights predicted one update ahead by rule "difference". Without
momentum the feedback lowers the largest stable learning rate. Source: PipeDream-2BW with error
feedback, arXiv 2606.30634, as cited by secondary sources; the identity is our own algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpart.runtime.weight_prediction.predictor import count_tensor_bytes


class ErrorFeedback:
    """Feedback over a stage's parameters; it stores one tensor for each.

    strength: b. last: the update before (u_{t-2}) of each parameter; None before there is one.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], strength: float) -> None:
        self.parameters = list(parameters)
        self.strength = strength
        self.last: list[torch.Tensor] | None = None

    def after_update(self, before: Sequence[torch.Tensor], *, late: bool = True) -> None:
        """Apply the feedback, right after the optimizer step.

        before: the weights before the step, which are not changed. late: whether the gradients were
        of weights one update old. Otherwise, and without an update before, there is no error, and
        the update is only stored.
        """
        first, self.last = self.last is None, self.last or [w.clone() for w in before]
        with torch.no_grad():
            for parameter, old, last in zip(self.parameters, before, self.last, strict=True):
                update = old - parameter.data
                if late and not first:
                    last.sub_(update)
                    parameter.data.add_(last, alpha=self.strength)
                last.copy_(update)

    def skip_update(self) -> None:
        """Count an update that was skipped: it moves nothing and has no error."""
        for last in self.last or ():
            last.zero_()

    def state_bytes(self) -> int:
        """Return the bytes of the updates."""
        return sum(map(count_tensor_bytes, self.last or ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next feedback depends on, beside the parameters."""
        return {"last": None if self.last is None else list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        last = state["last"]
        self.last = None if last is None else [one.detach().clone() for one in last]
