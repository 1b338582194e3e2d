"""What recomputation frees and runs again, on small graphs whose figures are known by formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
import torch
from stage_runs import assigned, prepared
from torch import fx, nn

from fxpart.capture import CapturedModel, capture
from fxpart.cluster.model import Cluster
from fxpart.codegen.materialization import materialize
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import split
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_recompute import LEAST_GAIN
from fxpart.pricing.joint_space import SearchSpace
from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.solver.joint.problem import JointProblem, MicrobatchCost

ROWS, LENGTH, WIDTH, HEADS = 4, 1024, 1024, 16


class Layer(nn.Module):
    """Attention whose scores are a tensor, and a feed-forward part of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def stack() -> tuple[fx.GraphModule, CapturedModel]:
    with torch.device("meta"):
        model = Stack(3).bfloat16().train()
        x = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
    captured = capture(model, (x, x), loss=torch.nn.functional.mse_loss, batch_size=ROWS)
    return prepared(captured), captured


def problem(**options: object) -> JointProblem:
    graph, captured = stack()
    space = SearchSpace(tensor=(1,), data=(1,), **options)  # type: ignore[arg-type]
    return joint_problem(graph, captured, Cluster.parse("8xh100"), batch_size=ROWS, space=space)[0]


def works(found: JointProblem) -> dict[str, MicrobatchCost]:
    return {w.recompute: w for w in found.works if w.rows == ROWS}


@pytest.mark.slow
def test_scores_and_activation_functions_are_made_again_products_are_not() -> None:
    """What stays of each layer: inputs of products over long sums; scores [B, h, L, L] go."""
    found = problem()
    none, some = works(found)["none"], works(found)["selective"]
    value = ROWS * LENGTH * WIDTH * 2
    scores = ROWS * HEADS * LENGTH * LENGTH * 2
    attention, feed = (found.kinds[found.blocks.index(n)] for n in ("layers.1", "layers.1#2"))
    assert none.activation[attention] - some.activation[attention] == scores
    assert none.activation[feed] - some.activation[feed] == 4 * value
    # a softmax and an activation function: fractions of the bandwidth that Hopper reaches
    for k, cost, reached in ((attention, scores, 0.65), (feed, 4 * value, 0.9)):
        again = some.backward[k] - none.backward[k]
        assert 0 < again < 0.45 * none.forward[k]
        expected = 2 * cost / (reached * 3.35e12) + 2e-6  # read and written
        assert again == pytest.approx(expected, rel=0.01)
    full = works(found)["full"]
    assert sum(full.activation[k] for k in found.kinds) < sum(
        some.activation[k] for k in found.kinds
    )


@pytest.mark.slow
def test_each_value_made_again_is_worth_its_time() -> None:
    """By block: bytes freed for a second against full recomputation's, as the rule says."""
    found = problem()
    none, some, full = (works(found)[mode] for mode in ("none", "selective", "full"))
    for k in range(len(none.forward)):
        again = some.backward[k] - none.backward[k]
        freed = none.activation[k] - some.activation[k]
        assert some.forward[k] == none.forward[k]
        assert some.workspace[k] == none.workspace[k] + freed
        if again > 0:
            whole = (none.activation[k] - full.activation[k]) / none.forward[k]
            # decided at another size, where launches weigh more
            assert freed / again >= 0.9 * LEAST_GAIN * whole


@pytest.mark.slow
def test_full_keeps_what_is_handed_on() -> None:
    found = problem()
    full = works(found)["full"]
    value = ROWS * LENGTH * WIDTH * 2
    for name in ("layers.0", "layers.0#2", "layers.1", "layers.1#2"):
        assert full.activation[found.kinds[found.blocks.index(name)]] == value


@pytest.mark.slow
def test_modes_that_are_not_allowed_are_not_priced() -> None:
    assert {w.recompute for w in problem(recompute=("none",)).works} == {"none"}
    assert {o.recompute for o in problem(recompute=("full",)).options} == {"full"}


@pytest.mark.slow
def test_a_block_without_backward_is_not_made_again() -> None:
    """Frozen layers in front keep nothing, so nothing is gained."""
    with torch.device("meta"):
        model = Stack(2).bfloat16().train()
        for part in (model.first, model.layers[0]):
            part.requires_grad_(False)
        x = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
    captured = capture(model, (x, x), loss=torch.nn.functional.mse_loss, batch_size=ROWS)
    space = SearchSpace(tensor=(1,), data=(1,))
    found, _ = joint_problem(
        prepared(captured), captured, Cluster.parse("8xh100"), batch_size=ROWS, space=space
    )
    none, full = works(found)["none"], works(found)["full"]
    frozen = found.kinds[0]
    assert none.backward[frozen] == full.backward[frozen]
    assert sum(full.backward) > sum(none.backward)


class Mixed(nn.Module):
    """Blocks of which some keep nothing but what they are given and hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 16),
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.25)),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_priced_again_is_what_runs_again() -> None:
    """By block: what the emitted stage runs twice, once all has been called and is known."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    captured = capture(Mixed(), (x, x), loss=nn.functional.mse_loss, batch_size=8)
    graph = prepared(captured)
    spec, (stage,) = split(assigned(graph, [0]), captured)
    module = load_stage(emit(stage, blocks=True), stage.spec)
    materialize(module, spec, captured.state)
    again, runs = StageRecomputation(module, "full"), Counter[str]()

    def call(piece: Callable[..., Any], *given: Any) -> Any:
        @wraps(piece)
        def counted(*values: Any) -> Any:
            runs[piece.__name__] += 1
            return piece(*values)

        return again.call(counted, *given)

    vars(module)["call"] = call
    for _ in range(2):
        runs.clear()
        (loss,) = module(0, x, x)
        loss.backward()

    space = SearchSpace(tensor=(1,), data=(1,))
    cluster = Cluster.parse("local:1")
    found, _ = joint_problem(graph, captured, cluster, batch_size=8, space=space)
    rows = {w.recompute: w for w in found.works if w.rows == 8}
    none, full = rows["none"], rows["full"]
    priced = [full.backward[kind] > none.backward[kind] for kind in found.kinds]
    assert [times == 2 for times in runs.values()] == priced
    assert set(runs.values()) == {1, 2}
