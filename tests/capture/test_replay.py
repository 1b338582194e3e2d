"""Layers that are repeated instead of traced: the graph is that of the model traced in full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO

from fxpart.capture import Captured, capture, request
from fxpart.capture.alike import TouchedError, Untouchable, counters, structure
from fxpart.capture.fingerprint import canonical_lines
from fxpart.capture.replay import REAL, Repeats
from fxpart.pipeline import KEY

LAYERS = 8
# The first layer stands alone, for its input needs no gradient; the last is always traced.
REPEATED = LAYERS - 1 - REAL - 1
X = torch.randn(3, 4)


class Layer(nn.Module):
    """A residual layer that knows its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.lin(self.norm(x)))


class Stack(nn.Module):
    """Layers of one class, one after another."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(i) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def capture_with(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, *, full: bool = False, **sizes: Any
) -> tuple[Captured, list[Repeats]]:
    """The capture of a model on X, and what was repeated in each attempt."""
    made: list[Repeats] = []

    def make(root: nn.Module) -> Repeats:
        made.append(Repeats(root, **({"least": 10**6} if full else sizes)))
        return made[-1]

    monkeypatch.setattr(request, "Repeats", make)
    return capture(model, (X,)), made


def text(captured: Captured) -> list[tuple[Any, ...]]:
    """Every node: what it does, its value, and where it came from.

    Without names, which may count sizes that were computed and thrown away.
    """
    nodes = captured.graph.graph.nodes
    lines = canonical_lines(captured.graph)
    return [(line, n.meta[KEY]) for line, n in zip(lines, nodes, strict=True)]


def repeated(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> int:
    """How many calls were repeated; the graph must be the full one, and compute the same."""
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert text(quick) == text(plain)
    assert quick.state.keys() == plain.state.keys()
    return made[0].repeated


def test_equal_layers_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    assert repeated(monkeypatch, model) == REPEATED
    captured, _ = capture_with(monkeypatch, model)
    modules = {n.meta[KEY].module for n in captured.graph.graph.nodes}
    assert {f"layers.{i}.lin" for i in range(LAYERS)} <= modules
    assert captured.symbolic
    assert torch.equal(captured.graph(X)[1], model(X))


def test_layers_on_meta_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Stack()
    assert repeated(monkeypatch, model) == REPEATED


class Odd(Layer):
    """Every second layer does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.index % 2 else x * 2


class Scaled(Layer):
    """The number becomes part of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (self.index + 1)


class Asks(Layer):
    """Asks for the number's type, and swallows what goes wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x) if isinstance(self.index, int) else x
        except Exception:
            return x


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Odd, Scaled, Asks])
def test_a_layer_that_looks_at_its_number(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]
) -> None:
    model = Stack(layer)
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert text(quick) == text(plain)
    assert made[0].touched and made[0].repeated == 0
    assert [layer.index for layer in model.layers] == list(range(LAYERS))


class Remembers(Layer):
    """Keeps a value of its last call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[-1] if not hasattr(self, "seen") else self.seen + 1
        return super().forward(x)


class Constant(Layer):
    """Has a constant in its forward, which the graph holds as a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Counts(Layer):
    """Writes a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)  # type: ignore[assignment]


class Rate(Layer):
    """Differs by a number that is no counter."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 1.0 / (index + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.rate


@pytest.mark.parametrize("layer", [Remembers, Constant, Counts, Rate])
def test_layers_that_are_always_traced(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]
) -> None:
    assert repeated(monkeypatch, Stack(layer)) == 0


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, result: result * 2)
    assert repeated(monkeypatch, model) == 0


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


def test_counters_and_structure() -> None:
    a, b = Layer(0), Layer(1)
    assert counters([a, b]) == {("", "index")}
    assert structure(a) != structure(b)
    assert structure(a, counters([a, b])) == structure(b, counters([a, b]))
    b.norm.eps = 1e-3
    assert structure(a, counters([a, b])) != structure(b, counters([a, b]))


def test_untouchable_refuses_everything() -> None:
    number: Any = Untouchable()
    uses: list[Callable[[], Any]] = [
        lambda: number + 1, lambda: 1 + number, lambda: number == 3, lambda: number < 3,
        lambda: [1, 2][number], lambda: isinstance(number, int), lambda: bool(number),
        lambda: hash(number), lambda: f"{number}", lambda: str(number), lambda: int(number),
        lambda: range(number), lambda: number % 2, lambda: number in (1, 2),
        lambda: [1] * number, lambda: number.bit_length(), lambda: -number,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TouchedError):
            use()
    assert number is not None


@pytest.mark.slow
def test_rows_and_lengths_free_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads its sizes from another op than the last; that is no difference."""
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=2, n_positions=32, attn_pdrop=0.0)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config).bfloat16().train()
        ids = torch.zeros(4, 32, dtype=torch.int64)
    made: list[Repeats] = []

    def take(least: int) -> Captured:
        def make(root: nn.Module) -> Repeats:
            made.append(Repeats(root, least=least))
            return made[-1]

        monkeypatch.setattr(request, "Repeats", make)
        return capture(model, None, {"input_ids": ids, "labels": ids}, batch_size=4)

    plain, quick = take(10**6), take(LAYERS)
    assert made[-1].repeated == LAYERS - REAL - 1
    assert text(quick) == text(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_with_as_much_repeated_as_can_be(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    take = partial(
        capture, built.model, built.batch, loss=built.loss, batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )  # fmt: skip
    monkeypatch.setattr(request, "Repeats", partial(Repeats, least=10**6))
    plain = take()
    monkeypatch.setattr(request, "Repeats", partial(Repeats, real=1, least=2))
    quick = take()
    assert text(quick) == text(plain)
