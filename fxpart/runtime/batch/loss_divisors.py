"""Buffers and constants whose sums divide the loss, such as class weights.

The program stores their values at compile time. A checkpoint or a change of the module may change
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.state.model_state import ModelState

_CHANGED = (
    "the loss is divided by a sum of it over the batch, and its values have changed since the "
    "program was compiled"
)
_AGAIN = "register it as a buffer, or compile again"


class LossDivisors:
    """Current values of the loss divisors.

    values: those that have changed since compilation, by name. live: the module's own tensors, if
    there is a module.
    """

    def __init__(
        self, spec: ProgramSpec, state: ModelState, unused: Mapping[str, torch.Tensor]
    ) -> None:
        """unused: state that no stage owns, by name."""
        self.values: dict[str, torch.Tensor] = {}
        self.live: Mapping[str, torch.Tensor] = {}
        self._seen: dict[str, torch.Tensor] = {}
        self._state, self._unused = state, unused
        self._compiled: dict[str, torch.Tensor] = {}
        for given in (spec.totals, spec.weight):
            for name, constant in () if given is None else given.constants.items():
                dtype = getattr(torch, constant.dtype)
                self._compiled[name] = torch.tensor(constant.values, dtype=dtype)
        state_items = [item for stage in spec.stages for item in stage.state]
        self._numbered = {item.name for item in state_items if item.kind == "constant"}

    def watch(self, state: Mapping[str, torch.Tensor]) -> None:
        """Record the module's own tensors, by name, and their current values."""
        self.live = {name: state[name] for name in self._compiled if name in state}
        self._seen = {name: tensor.detach().cpu().clone() for name, tensor in self.live.items()}

    def renew(self) -> None:
        """Read the values from the ranks that own them; call it on every rank after a load."""
        if not self._compiled:
            return
        reports = {n: (str(t.dtype)[6:], t.tolist()) for n, t in self._local_values().items()}
        raws = self._state.transport.exchange_bytes(msgspec.json.encode(reports))
        found: dict[str, torch.Tensor] = {}
        for raw in raws:
            for name, (dtype, values) in msgspec.json.decode(raw).items():
                found.setdefault(name, torch.tensor(values, dtype=getattr(torch, dtype)))
        self._update_values(found)

    def renew_here(self) -> None:
        """Read the values after a change of the module that every rank has made."""
        now = {name: tensor.detach().cpu() for name, tensor in self.live.items()}
        changed = {n: t.clone() for n, t in now.items() if not torch.equal(t, self._seen[n])}
        self._seen |= changed
        self._update_values({**changed, **self._local_values()})

    def _local_values(self) -> dict[str, torch.Tensor]:
        """Return the divisors that this process has as whole tensors."""
        found = {}
        for name, compiled in self._compiled.items():
            entry = self._state.entries.get(name)
            tensor = self._unused.get(name) if entry is None else entry.first()
            if tensor is not None and tensor.shape == compiled.shape:
                found[name] = tensor
        return found

    def _update_values(self, found: Mapping[str, torch.Tensor]) -> None:
        """Store changed values; FXP113 for a lifted constant, which each capture numbers anew."""
        problems = []
        for name, tensor in found.items():
            value = tensor.detach().to("cpu", copy=True)
            if name not in self.values and torch.equal(value, self._compiled[name]):
                continue
            if name in self._numbered:
                problems.append(Problem("FXP113", name, _CHANGED, _AGAIN))
            self.values[name] = value
        if problems:
            raise FxpartError(problems)
