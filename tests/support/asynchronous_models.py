"""Two models and their backward passes with weights of their own, written by hand.

An MLP by explicit formulas; a GPT whose every op with a weight is an autograd function that gets
the weights of its backward from a dict, filled just before it. Names are those of the modules'
parameters, so that any cut of the model into stages can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

Weights = dict[str, torch.Tensor]


def mlp(blocks: int = 4, width: int = 6, classes: int = 3) -> nn.Module:
    """Linear and tanh, ``blocks`` times, and a Linear at the end."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def mlp_batches(
    count: int, rows: int, width: int = 6, classes: int = 3, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a task that can be learned: the largest of the first numbers."""
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, width, generator=draw) for _ in range(count)]
    return [(x, x[:, :classes].argmax(1)) for x in inputs]


# Three formulas by torch's own kernels, so that the bits can be compared; a test has the formulas.
_ATEN: Any = torch.ops.aten


def tanh_slope(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """g (1 - y^2), y being the tanh."""
    found: torch.Tensor = _ATEN.tanh_backward(gradient, y)
    return found


def mean_loss(logs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Minus the mean of each row's log probability of its target."""
    found: torch.Tensor = _ATEN.nll_loss_forward(logs, targets, None, 1, -100)[0]
    return found


def softmax_slope(gradient: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """g - softmax times the sum of g, along the rows of log probabilities."""
    found: torch.Tensor = _ATEN._log_softmax_backward_data(gradient, logs, 1, logs.dtype)
    return found


class HandMlp:
    """Forward and backward of :func:`mlp` with a mean cross entropy, by their formulas."""

    def __init__(self, names: list[str]) -> None:
        """names: of its parameters, in order."""
        self.layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]

    def forward(
        self, weights: Weights, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """The mean loss, and what backward needs: each layer's input, log probabilities."""
        taped, x = [], inputs
        for layer in self.layers:
            taped.append(x)
            x = torch.addmm(weights[f"{layer}.bias"], x, weights[f"{layer}.weight"].t())
            if layer != self.layers[-1]:
                x = torch.tanh(x)
        logs = x.log_softmax(1)
        return mean_loss(logs, targets), (taped, logs, targets)

    def backward(self, weights: Weights, tape: Any, share: float) -> Weights:
        """Gradients of ``share`` times the loss; what goes back goes through ``weights``."""
        taped, logs, targets = tape
        gradient = torch.zeros_like(logs)
        gradient[torch.arange(len(targets)), targets] = -share / len(targets)
        gradient = softmax_slope(gradient, logs)
        found: Weights = {}
        for number in range(len(self.layers) - 1, -1, -1):
            layer, x = self.layers[number], taped[number]
            found[f"{layer}.weight"] = gradient.t() @ x
            found[f"{layer}.bias"] = gradient.sum(0)
            if number:  # x is the tanh before it
                gradient = gradient @ weights[f"{layer}.weight"]
                gradient = tanh_slope(gradient, x)
        return found


class Block(nn.Module):
    """Attention and a two-layer MLP, each after a norm, on a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        """width: of the stream, which the heads share."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream after the block."""
        x = x + self.out(attended(self.qkv(self.norm1(x)), self.heads))
        more: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + more


def attended(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention of all heads; the only op of a block without weights."""
    rows, length, width = qkv.shape
    parts = qkv.view(rows, length, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    query, key, value = parts[0], parts[1], parts[2]
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(rows, length, width // 3)


class Gpt(nn.Module):
    """Embeddings, blocks, a norm and an untied head."""

    def __init__(self, blocks: int = 4, width: int = 8, heads: int = 2, words: int = 11) -> None:
        """words: in the vocabulary."""
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.heads = heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of each next token."""
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all places."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_batches(
    count: int, rows: int, length: int = 5, words: int = 11, seed: int = 2
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that count up from a random start by a random step."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start = torch.randint(0, words, (rows, 1), generator=draw)
        step = torch.randint(1, 3, (rows, 1), generator=draw)
        ids = (start + step * torch.arange(length + 1)) % words
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return found


class _Linear(torch.autograd.Function):
    """x W' + b; what goes back goes through the weight that ``later`` has by then."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, later: Weights, name: str
    ) -> torch.Tensor:
        ctx.taped = x
        ctx.later, ctx.name, ctx.bias = later, name, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wide = gradients[0]
        gradient, x = wide.reshape(-1, wide.shape[-1]), ctx.taped.reshape(-1, ctx.taped.shape[-1])
        back = (gradient @ ctx.later[ctx.name]).view_as(ctx.taped)
        return back, gradient.t() @ x, gradient.sum(0) if ctx.bias else None, None, None


class _Norm(torch.autograd.Function):
    """A layer norm; what goes back is scaled by the weight that ``later`` has by then."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, later: Weights,
        name: str,
    ) -> torch.Tensor:  # fmt: skip
        made, mean, scale = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, 1e-5)
        ctx.taped, ctx.later, ctx.name = (x, mean, scale, bias), later, name
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mean, scale, bias = ctx.taped
        back: Any = torch.ops.aten.native_layer_norm_backward
        found = back(
            gradients[0], x, [x.shape[-1]], mean, scale, ctx.later[ctx.name], bias, [True] * 3
        )
        return *found, None, None


class HandGpt:
    """Forward and backward of :class:`Gpt` with separate weights."""

    def __init__(self, blocks: int = 4, heads: int = 2) -> None:
        """blocks, heads: those of the module."""
        self.blocks, self.heads = blocks, heads

    def forward(
        self, weights: Weights, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """The mean loss; and the graph, the leaves, and the dict that backward reads."""
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        later: Weights = {}

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            apply: Any = _Linear.apply
            bias = leaves.get(f"{name}.bias")
            made = apply(x, leaves[f"{name}.weight"], bias, later, f"{name}.weight")
            assert isinstance(made, torch.Tensor)
            return made

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            apply: Any = _Norm.apply
            weight, bias = leaves[f"{name}.weight"], leaves[f"{name}.bias"]
            made = apply(x, weight, bias, later, f"{name}.weight")
            assert isinstance(made, torch.Tensor)
            return made

        x = functional.embedding(inputs, leaves["token.weight"])
        x = x + leaves["place.weight"][: inputs.shape[1]]
        for number in range(self.blocks):
            at = f"blocks.{number}"
            mixed = attended(linear(norm(x, f"{at}.norm1"), f"{at}.qkv"), self.heads)
            x = x + linear(mixed, f"{at}.out")
            wide = functional.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.up"))
            x = x + linear(wide, f"{at}.down")
        loss = gpt_loss(linear(norm(x, "norm"), "head"), targets)
        return loss.detach(), (loss, leaves, later)

    def backward(self, weights: Weights, tape: Any, share: float) -> Weights:
        """Gradients of ``share`` times the loss; what goes back goes through ``weights``."""
        loss, leaves, later = tape
        later.update(weights)
        found = torch.autograd.grad([loss], list(leaves.values()), [torch.full_like(loss, share)])
        return dict(zip(leaves, found, strict=True))
