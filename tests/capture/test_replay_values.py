"""Repeated layers whose values go other ways: written, leaked, masked, tied, from globals."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import torch
from repeated_layers import LAYERS, REPEATED, Layer, Stack, capture_with, repeated, text
from torch import nn

pytestmark = pytest.mark.slow


class Writes(Stack):
    """Every layer gets a value that it writes to."""

    class Inner(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return self.lin(x)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__(Writes.Inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1)


def test_layers_that_write_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated(monkeypatch, Writes()) == 0


KEPT: deque[torch.Tensor] = deque()  # nobody looks into one, as into lists among globals


class Leaks(Stack):
    """Values of the layers reach the output by a list that no layer holds.

    shared: a module is in two places, for which tracers wrap all modules in proxies.
    """

    class Inner(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            z = torch.relu(y)
            KEPT.append({"argument": x, "inner": y.detach(), "result": z}[self.what])
            return z

    def __init__(self, what: str, shared: bool) -> None:
        super().__init__(Leaks.Inner)
        for layer in self.layers:
            layer.what = what
        if shared:
            self.again = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.clear()
        x = super().forward(x)
        return x + torch.stack(tuple(KEPT)).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["argument", "inner", "result"])
@pytest.mark.parametrize("shared", [False, True])
def test_values_that_leave_a_layer_by_the_back_door(
    monkeypatch: pytest.MonkeyPatch, what: str, shared: bool
) -> None:
    model = Leaks(what, shared)
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    KEPT.clear()
    assert text(quick) == text(plain)
    assert made[0].repeated == (REPEATED if what == "inner" else 0), "if tried, then given up"


class Arguments(Stack):
    """Layers called with one of two masks, a flag, and nothing."""

    class Inner(Layer):
        def forward(
            self, x: torch.Tensor, *, mask: torch.Tensor | None, flag: bool
        ) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
            y = self.lin(x)
            y = y if mask is None else y * mask
            return (y if flag else -y), None, {"same": x}

    def __init__(self) -> None:
        super().__init__(Arguments.Inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = (x > 0, x < 1)
        for i, layer in enumerate(self.layers):
            x, _, more = layer(x, mask=masks[i % 2] if i % 3 else None, flag=i % 4 > 0)
            x = x + more["same"]
        return x


def test_arguments_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = capture_with(monkeypatch, Arguments(), full=True)
    quick, made = capture_with(monkeypatch, Arguments(), real=1, least=2)
    assert text(quick) == text(plain)
    assert made[0].repeated > 0


class Masks(Stack):
    """One mask for the first layers, another of the same shape for the rest."""

    class Inner(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.lin(x) * mask  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__(Masks.Inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = (x > 0, x < 1)
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i >= 5])
        return x


def test_another_mask_than_the_traced_layers_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated(monkeypatch, Masks()) == 1, "layer 4 alone"


class Tied(Stack):
    """One layer called again and again, and one weight used twice within each."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.other = nn.Linear(4, 4)
            layer.other.weight = layer.lin.weight
        self.layers[6] = self.layers[4]


@pytest.mark.slow
def test_ties_and_a_layer_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated(monkeypatch, Tied()) == REPEATED


SEEN, UNSEEN = [0], deque([0])


class Secret(Stack):
    """One layer differs by something that no layer holds."""

    class Inner(Layer):
        def __init__(self, index: int, where: list[int] | deque[int], other: int) -> None:
            super().__init__(index)
            self.odd = where is SEEN, other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen, other = self.odd
            return -x if (SEEN if seen else UNSEEN)[0] == other else super().forward(x)

    def __init__(self, where: list[int] | deque[int], other: int) -> None:
        super().__init__(partial(Secret.Inner, where=where, other=other))
        self.where, self.other = where is SEEN, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers, 1):
            (SEEN if self.where else UNSEEN)[0] = number if number == self.other else 0
            x = layer(x)
        return x


def test_the_last_layer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Secret(UNSEEN, LAYERS)
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert text(quick) == text(plain)
    assert made[0].repeated == REPEATED, "it was tried, and given up"


def test_a_global_that_changes_one_layer_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Secret(SEEN, LAYERS - 2)
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert made[0].repeated == 1, "found at the odd layer, and given up"
    assert text(quick) == text(plain)
