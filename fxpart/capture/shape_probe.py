"""Run the user's module once, on fake tensors if possible, to learn shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.capture.context_managers import REAL_LIMIT, preserve_buffers
from fxpart.capture.fake_tensors import make_fake
from fxpart.capture.model_with_loss import ModelWithLoss
from fxpart.capture.python_state import PythonState
from fxpart.compat import fake_mode, get_write_count


@dataclass
class ShapeProbe:
    """Runs a module with loss on tensors of given shapes.

    mode: the fake mode of a model without data. real: whether to run on real data, because the
    model reads values (set by :meth:`choose`). first: the shapes that choose() found. trained:
    whether it ran on fakes with gradients; graph: the results of that run with their autograd
    graph. written: the positions of inputs that a run on fakes has written in place.
    """

    whole: ModelWithLoss
    mode: Any | None = None
    real: bool = False
    first: dict[str, tuple[int, ...]] | None = None
    trained: bool = False
    graph: dict[str, torch.Tensor] | None = None
    written: set[int] = field(default_factory=set)
    state: PythonState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Record the Python state that every run starts from."""
        self.state = PythonState.of(self.whole.model, self.whole.loss)

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of loss and outputs by name; raise the module's errors."""
        try:
            with torch.no_grad():
                return self._shapes(self._call(tensors))
        except Exception:  # the user's module may raise anything
            if not self.trained:
                raise
        return self._shapes(self._graph(tensors))

    def _shapes(self, returned: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes, and record which outputs are floating-point."""
        self.whole.floating = frozenset(
            n for n, t in returned.items() if "/" not in n and t.is_floating_point()
        )
        return {name: tuple(int(s) for s in t.shape) for name, t in returned.items()}

    def returned(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss and outputs with their autograd graph, reusing the run of choose() once."""
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
        before = [get_write_count(t) for t in fakes]
        with mode:
            found = self.whole(fakes)
        self.written |= {i for i, t in enumerate(fakes) if get_write_count(t) != before[i]}
        return found  # type: ignore[no-any-return]

    def choose(self, tensors: Sequence[torch.Tensor]) -> Exception | None:
        """Run once; switch to real data if fakes fail. Return the failure, if any.

        Fake kernels can be missing or stricter than the real ones, so only a failure on real data
        means that the model itself fails (then ``real`` is set).
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
        except Exception as failure:  # the user's module may raise anything
            return failure
        return None

    def _with_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Run once on fakes with gradients; return whether it succeeded."""
        try:
            self.graph = self._graph(tensors)
        except Exception:  # the user's module may raise anything
            return False
        self.trained = True
        self.first = self._shapes(self.graph)
        return True
