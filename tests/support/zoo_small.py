"""Models of the zoo that need torch alone, each with one trait that partitioners get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from zoo_entry import Built, Entry, ids


class MLP(nn.Module):
    """Linear layers with GELU between them."""

    def __init__(self, size: int = 16, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        sizes = [size, *[width] * (depth - 1), size]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(functional.gelu(x))
        return x


def _mlp() -> Built:
    return Built(MLP(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


class SharedMLP(nn.Module):
    """One hidden layer used three times under two names; the output weight is the input's."""

    def __init__(self, size: int = 16, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(size, width, bias=False)
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, size, bias=False)
        self.last.weight = self.first.weight
        self.again = self.hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.hidden(x)) + x
        x = torch.tanh(self.hidden(x)) + x
        return self.last(torch.tanh(self.again(x)))


def _shared() -> Built:
    return Built(SharedMLP(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


class Recommender(nn.Module):
    """Two towers: EmbeddingBag features of user and item, multiplied, and a click probability."""

    def __init__(self, users: int = 50, items: int = 70, width: int = 16) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(items, width, mode="mean")
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.tags = nn.EmbeddingBag(20, width, mode="sum")
        self.left = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, width))
        self.right = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(
        self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor, tags: torch.Tensor
    ) -> torch.Tensor:
        left = self.left(torch.cat([self.user(user), self.history(history)], 1))
        right = self.right(torch.cat([self.item(item), self.tags(tags)], 1))
        return (left * right).sum(1)


def _recommender() -> Built:
    batch = {
        "user": torch.randint(0, 50, (8,)),
        "history": torch.randint(0, 70, (8, 5)),
        "item": torch.randint(0, 70, (8,)),
        "tags": torch.randint(0, 20, (8, 3)),
        "target": torch.randint(0, 2, (8,)).float(),
    }
    return Built(Recommender(), batch, functional.binary_cross_entropy_with_logits, 8)


class Translator(nn.Module):
    """nn.Transformer with causal masks made inside, without dropout."""

    def __init__(self, vocabulary: int = 61, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(32, width) * 0.02)
        self.transformer = nn.Transformer(width, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        source = self.embed(source) + self.positions[: source.shape[1]]
        target = self.embed(target) + self.positions[:length]
        return self.head(self.transformer(source, target, tgt_mask=mask))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _translator() -> Built:
    batch = (ids(4, 9, 61), ids(4, 7, 61), ids(4, 7, 61))
    return Built(Translator(), batch, token_loss, 4)


class Classifier(nn.Module):
    """An embedding, a two-layer LSTM and a head on the last state."""

    def __init__(self, vocabulary: int = 61, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states[:, -1])


def _lstm() -> Built:
    batch = (ids(4, 9, 61), torch.randint(0, 4, (4,)))
    return Built(Classifier(), batch, nn.CrossEntropyLoss(), 4)


class GraphLayer(nn.Module):
    """Messages along the edges of one graph, summed at their targets with index_add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = torch.relu(self.message(nodes))[:, edges[0]]
        summed = torch.zeros_like(nodes).index_add(1, edges[1], messages)
        return torch.relu(self.update(torch.cat([nodes, summed], -1))) + nodes


class GraphNet(nn.Module):
    """Node features in a batch over one fixed graph: the edges have no batch dim."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes.mean(1)).squeeze(-1)


def _graph() -> Built:
    batch = (torch.randn(4, 10, 16), torch.randint(0, 10, (2, 24)), torch.randn(4))
    return Built(GraphNet(), batch, functional.mse_loss, 4)


class Attention(nn.Module):
    """Self-attention with a mask [S, S] and positions [S] given from outside, without batch dim."""

    def __init__(self, width: int = 16, vocabulary: int = 61, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(32, width)
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.position(positions)
        for layer in self.mix:
            query, key, value = layer(x).chunk(3, -1)
            scores = query @ key.transpose(1, 2) / 4.0 + mask
            x = x + scores.softmax(-1) @ value
        return self.head(x)


def _side_mask() -> Built:
    mask = torch.full((6, 6), float("-inf")).triu(1)
    batch = {
        "tokens": ids(4, 6, 61),
        "positions": torch.arange(6),
        "mask": mask,
        "labels": ids(4, 6, 61),
    }
    return Built(Attention(), batch, token_loss, 4)


class Frozen(MLP):
    """A perceptron whose first half and one bias are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:3]:
            layer.requires_grad_(False)
        self.layers[4].bias.requires_grad_(False)


def _frozen() -> Built:
    return Built(Frozen(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


class Dropouts(nn.Module):
    """Every kind of dropout, functional ones and noise included."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.drop1d = nn.Dropout1d(0.2)
        self.alpha = nn.AlphaDropout(0.1)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.first(x)))
        if self.training:
            x = x + 0.01 * torch.randn_like(x)
        y = self.drop1d(self.conv(x.view(x.shape[0], 4, 4))).flatten(1)
        return self.last(functional.dropout(self.alpha(y) + x, 0.2, self.training))


def _dropouts() -> Built:
    return Built(Dropouts(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


@dataclass
class Answers:
    """A dataclass output that is no transformers class."""

    score: torch.Tensor
    parts: dict[str, torch.Tensor]
    note: str = "not a tensor"


class ManyWays(nn.Module):
    """Several inputs in nested containers, a flag, a None; several outputs in a dataclass."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(
        self,
        pair: tuple[torch.Tensor, torch.Tensor],
        *,
        extra: dict[str, torch.Tensor],
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        double: bool = False,
    ) -> Answers:
        left, right = self.left(pair[0]), self.right(pair[1])
        both = torch.tanh(left + right) * extra["gate"].sigmoid()
        if bias is not None:
            both = both + bias
        both = both * scale + (extra["shift"] if double else 0.0)
        return Answers(self.head(both).squeeze(-1), {"left": left, "both": both})


def answer_loss(answers: Answers, goal: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(answers.score, goal) + 0.1 * answers.parts["both"].pow(2).mean()


def _many_ways() -> Built:
    batch = {
        "pair": (torch.randn(6, 8), torch.randn(6, 8)),
        "extra": {"gate": torch.randn(6, 8), "shift": torch.randn(8)},
        "bias": None,
        "scale": 0.5,
        "double": True,
        "goal": torch.randn(6),
    }
    return Built(ManyWays(), batch, answer_loss, 6)


class Regions(nn.Module):
    """A no_grad teacher, an autocast region in bfloat16 and a running mean kept in a buffer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.teacher = nn.Linear(width, width)
        self.student = nn.Linear(width, width)
        self.head = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)
        self.offset = torch.linspace(-1, 1, width)  # a plain tensor: a lifted constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = torch.tanh(self.teacher(x))
            if self.training:
                self.mean.mul_(0.9).add_(goal.mean(0), alpha=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.student(x)
        y = y.float() * self.scale + self.offset + torch.tensor([0.25])
        return self.head(torch.relu(y)) - goal + self.mean.detach()


def _regions() -> Built:
    return Built(Regions(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


class InPlace(nn.Module):
    """In-place ops on values, on views and through indexing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], 4, x.shape[1], dtype=x.dtype, device=x.device)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            y.add_(x).mul_(0.9)
            y[:, ::2].mul_(0.5)
            out[:, i] = y
            x = y * 1.0
        x.clamp_(-3, 3)
        return out.sum(1) + x


def _in_place() -> Built:
    return Built(InPlace(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


SMALL: dict[str, Entry] = {
    "mlp": Entry(_mlp, note="linear layers"),
    "shared_mlp": Entry(_shared, note="one layer used thrice, tied weights"),
    "recommender": Entry(_recommender, note="EmbeddingBag, two towers"),
    "transformer": Entry(_translator, tolerance=1e-6, note="nn.Transformer"),
    "lstm": Entry(_lstm, note="nn.LSTM"),
    "graph_net": Entry(_graph, note="index_add over edges without batch dim"),
    "side_mask": Entry(_side_mask, note="mask [S, S] and positions [S]"),
    "frozen": Entry(_frozen, note="frozen layers"),
    "dropouts": Entry(_dropouts, note="dropout of every kind"),
    "many_ways": Entry(_many_ways, note="nested inputs, constants, dataclass output"),
    "regions": Entry(_regions, cuttable=False, note="no_grad, autocast, buffers, constants"),
    "in_place": Entry(_in_place, note="in-place ops on views"),
}
