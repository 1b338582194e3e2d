"""Running the user's module once, without data where possible, to learn shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.capture.fakes import stand_in
from fxpart.capture.modes import kept_buffers
from fxpart.capture.whole import Whole
from fxpart.compat import fake_mode

REAL_LIMIT = 200_000_000  # parameters: larger models are not run for real to learn a shape


@dataclass
class Trial:
    """Runs a whole module on tensors of given shapes.

    mode: the fakes' mode of a model without data. real: whether to run with data, because the
    model looks at values (chosen by :meth:`choose`).
    """

    whole: Whole
    mode: Any | None = None
    real: bool = False

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of loss and outputs by name; raises what the module raises."""
        with torch.no_grad():
            returned = self._call(tensors)
        self.whole.floating = frozenset(
            n for n, t in returned.items() if "/" not in n and t.is_floating_point()
        )
        return {name: tuple(int(s) for s in t.shape) for name, t in returned.items()}

    def returned(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loss and outputs themselves, with their autograd graph."""
        with torch.enable_grad():
            return self._call(tensors)

    def _call(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.real:
            with kept_buffers(self.whole), torch.random.fork_rng():
                return self.whole(tuple(t.clone() for t in tensors))  # type: ignore[no-any-return]
        mode = self.mode or fake_mode()
        fakes = tuple(stand_in(mode, t) for t in tensors)
        with mode:
            return self.whole(fakes)  # type: ignore[no-any-return]

    def choose(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        """Run once; turn to real data where the fakes will not do. Returns the failure, if any.

        Operators' fake kernels can be missing, or stricter than the real ones: only a failure with
        data says that the model itself fails (then ``real`` is set).
        """
        failure = self._attempt(tensors)
        count = sum(p.numel() for p in self.whole.parameters())
        if failure is None or self.mode is not None or count > REAL_LIMIT:
            return failure
        self.real = True
        return self._attempt(tensors)

    def _attempt(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        try:
            self.run(tensors)
        except Exception as failure:  # whatever the user's module raises
            return failure
        return None
