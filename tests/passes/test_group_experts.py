"""group_experts: mixtures become one op, bit for bit; what is not surely one is left alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from fxpart.passes import all_passes
from torch import fx, nn
from torch.nn import functional
from zoo import ZOO
from zoo_language import _causal

from fxpart.capture import CapturedModel, capture
from fxpart.collectives.experts import statements
from fxpart.compiler import PassManager

pytestmark = pytest.mark.slow

BEFORE = "drop_asserts,inline_regions,remove_inplace,simplify"
TOKENS, EXPERTS, CHOSEN, WIDTH, INNER = 6, 4, 2, 8, 12


class Mixture(nn.Module):
    """A mixture of experts as models write it. change: how this one differs, "" for not at all."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        gate = 1 if change == "no gate" else 2
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        shape = (EXPERTS, WIDTH, gate * INNER), (EXPERTS, INNER, WIDTH)
        if change != "plain":
            shape = tuple((e, b, a) for e, a, b in shape)  # type: ignore[assignment]
        self.up = nn.Parameter(torch.randn(shape[0]))
        self.down = nn.Parameter(torch.randn(shape[1]))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, gate * INNER))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        weights, index = torch.softmax(self.router(hidden), -1).topk(CHOSEN)
        flat = index.reshape(-1)
        ids, order = torch.sort(flat, descending=self.change == "descending")
        rows = hidden[order // (3 if self.change == "other rows" else CHOSEN)]
        if self.change == "other tokens":
            rows = rows + 1
        bins = EXPERTS + 1 if self.change == "other bins" else EXPERTS
        counts = torch.histc(ids.float(), bins=bins, min=0, max=bins - 1)
        counts = counts[:EXPERTS] if self.change == "other bins" else counts
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        inner = self._product(rows, self.up, ends)
        if self.change == "biases":
            inner = inner + self.up_bias[ids]
        out = self._product(self._body(inner), self.down, ends)
        if self.change in ("biases", "other bias"):
            out = out + self.down_bias[ids if self.change == "biases" else flat]
        scale = weights.reshape(-1)[flat if self.change == "other weights" else order]
        weighed = out * scale.unsqueeze(-1)
        place = torch.arange(order.size(0))
        place = place + 1 if self.change == "other places" else place
        back = torch.empty_like(order).index_put((order,), place)
        folded = weighed[back % order.size(0) if self.change == "other places" else back]
        folded = folded.view(-1, CHOSEN, WIDTH)
        total = folded.sum(0 if self.change == "other sum" else 1)
        if self.change == "inner used":
            return total.sum() + inner.sum()
        return total

    def _product(
        self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        turned = weight if self.change == "plain" else weight.transpose(-2, -1)
        return torch.ops.fxpart.grouped_product(rows, turned, ends)

    def _body(self, inner: torch.Tensor) -> torch.Tensor:
        if self.change == "no gate":
            return functional.relu(inner).square()
        if self.change == "pairs":
            gate, up = inner[..., ::2].clamp(max=0.7), inner[..., 1::2].clamp(-0.7, 0.7)
            return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        gate, up = inner.chunk(2, -1)
        if self.change == "softmax":
            return gate.softmax(-1) * up
        if self.change == "dropout":
            return functional.dropout(gate, 0.5) * up
        if self.change == "across rows":
            return functional.silu(gate) * up.mean(0, keepdim=True)
        return functional.gelu(gate, approximate="tanh") * up


def _loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out.reshape(-1)[0] + out * out).mean() + y.mean()


@cache
def captured(change: str) -> CapturedModel:
    torch.manual_seed(0)
    x = torch.randn(TOKENS // 2, 2, WIDTH)
    return capture(
        Mixture(change).train(), (x, x), loss=_loss, batch_size=3,
        batch_dims={"x": 0, "y": 0},
    )  # fmt: skip


def grouped(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=torch.ops.fxpart.experts.default)


def results(
    graph: fx.GraphModule, whole: CapturedModel, given: list[Any]
) -> list[torch.Tensor | None]:
    """Outputs and gradients of all parameters."""
    outs = fx.Interpreter(graph).run(*given)
    trained = [t for _, t in sorted(whole.state.items()) if t.requires_grad]
    return [*outs, *torch.autograd.grad(outs[0], trained, allow_unused=True)]


def same(whole: CapturedModel, given: list[Any]) -> list[fx.Node]:
    """Run with and without the pass; every bit is equal. The new ops."""
    before = PassManager(all_passes()).run(BEFORE, whole.graph)
    after = PassManager(all_passes()).run(f"{BEFORE},group_experts", whole.graph)
    for a, b in zip(results(before, whole, given), results(after, whole, given), strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
    found = grouped(after)
    if not found:
        assert [str(n) for n in after.graph.nodes] == [str(n) for n in before.graph.nodes]
    return found


X = torch.randn(TOKENS // 2, 2, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("change", "parts", "count"),
    [("", "halves", 2), ("plain", "halves", 2), ("no gate", "", 2), ("pairs", "pairs", 7),
     ("biases", "halves", 2)],
)  # fmt: skip
def test_mixtures(change: str, parts: str, count: int) -> None:
    whole = captured(change)
    (call,) = same(whole, [X, X])
    *_, body, found, plain, product = call.args
    assert (found, plain, product) == (parts, change == "plain", "loop")
    assert len(statements(body)) == count
    assert all((given is not None) == (change == "biases") for given in call.args[5:7])
    left = {n.target for n in call.graph.nodes if n.op == "call_function"}
    assert torch.ops.aten.topk.default in left
    assert not left & {torch.ops.aten.sort.default, torch.ops.fxpart.grouped_product.default}


@pytest.mark.parametrize(
    "change",
    ["descending", "other rows", "other tokens", "other bins", "other bias", "other weights",
     "other places", "other sum", "inner used", "softmax", "across rows"],
)  # fmt: skip
def test_what_differs_is_left_alone(change: str) -> None:
    assert not same(captured(change), [X, X])


def test_random_bodies_are_left_alone() -> None:
    graph = PassManager(all_passes()).run(f"{BEFORE},group_experts", captured("dropout").graph)
    assert not grouped(graph)


def test_twice_changes_nothing_more() -> None:
    once = PassManager(all_passes()).run(f"{BEFORE},group_experts", captured("").graph)
    again = PassManager(all_passes()).run("group_experts", once)
    assert [str(n) for n in again.graph.nodes] == [str(n) for n in once.graph.nodes]


_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "head_dim": 8,
}  # fmt: skip


@pytest.mark.skipif(not ZOO["mixtral"].available, reason="needs transformers")
@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        ("Mixtral", {}, 2),
        ("Mixtral", {"dtype": torch.bfloat16}, 2),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 24}, 2),
        ("GptOss", {}, 2),
        ("Glm4Moe", {"first_k_dense_replace": 1}, 1),
        ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2}, 1),
        ("NemotronH", {}, 1),
    ],
)
def test_models(kind: str, options: dict[str, Any], count: int) -> None:
    options = {**_SMALL, **options}
    dtype = options.pop("dtype", torch.float32)
    built = _causal(f"{kind}ForCausalLM", f"{kind}Config", **options)()
    whole = capture(built.model.to(dtype), built.batch, loss=None, batch_size=built.batch_size)
    found = same(whole, [built.batch[spec.path[0]] for spec in whole.inputs])
    assert len(found) == count
    assert all(n.args[-1] == ("grouped" if dtype == torch.bfloat16 else "loop") for n in found)
