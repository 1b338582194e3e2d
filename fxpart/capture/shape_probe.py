"""Running the user's module once, without data where possible, to learn shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.capture.context_managers import REAL_LIMIT, preserve_buffers
from fxpart.capture.fake_tensors import make_fake
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.python_state import PythonState
from fxpart.compat import fake_mode


@dataclass
class ShapeProbe:
    """Runs a whole module on tensors of given shapes.

    mode: the fakes' mode of a model without data. real: whether to run with data, because the
    model looks at values (chosen by :meth:`choose`). first: the shapes that choose() found.
    trained: whether it ran on fakes with gradients; graph is what it returned then, with its
    autograd graph.
    """

    whole: ModelWithLoss
    mode: Any | None = None
    real: bool = False
    first: dict[str, tuple[int, ...]] | None = None
    trained: bool = False
    graph: dict[str, torch.Tensor] | None = None
    state: PythonState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Note the Python state that every run starts from."""
        self.state = PythonState.of(self.whole.model, self.whole.loss)

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of loss and outputs by name; raises what the module raises."""
        try:
            with torch.no_grad():
                return self._shapes(self._call(tensors))
        except Exception:  # whatever the user's module raises
            if not self.trained:
                raise
        return self._shapes(self._graph(tensors))

    def _shapes(self, returned: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Their shapes; which of them float is noted."""
        self.whole.floating = frozenset(
            n for n, t in returned.items() if "/" not in n and t.is_floating_point()
        )
        return {name: tuple(int(s) for s in t.shape) for name, t in returned.items()}

    def returned(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loss and outputs themselves, with their autograd graph; those of choose(), once."""
        found, self.graph = self.graph, None
        return self._graph(tensors) if found is None else found

    def _graph(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            return self._call(tensors)

    def _call(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        self.whole.noting = True
        try:
            with self.state.unchanged():
                return self._called(tensors)
        finally:
            self.whole.noting = False

    def _called(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.real:
            with preserve_buffers(self.whole), torch.random.fork_rng():
                return self.whole(tuple(t.clone() for t in tensors))  # type: ignore[no-any-return]
        mode = self.mode or fake_mode()
        fakes = tuple(make_fake(mode, t) for t in tensors)
        with mode:
            return self.whole(fakes)  # type: ignore[no-any-return]

    def choose(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        """Run once; turn to real data where the fakes will not do. Returns the failure, if any.

        Operators' fake kernels can be missing, or stricter than the real ones: only a failure with
        data says that the model itself fails (then ``real`` is set).
        """
        if self._with_gradients(tensors):
            return None
        failure = self._attempt(tensors)
        count = sum(p.numel() for p in self.whole.parameters())
        if failure is None or self.mode is not None or count > REAL_LIMIT:
            return failure
        self.real = True
        return self._attempt(tensors)

    def _attempt(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        try:
            self.first = self.run(tensors)
        except Exception as failure:  # whatever the user's module raises
            return failure
        return None

    def _with_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Run once on fakes as in training, which tells two things at once; False if it fails."""
        try:
            self.graph = self._graph(tensors)
        except Exception:  # whatever the user's module raises
            return False
        self.trained = True
        self.first = self._shapes(self.graph)
        return True
