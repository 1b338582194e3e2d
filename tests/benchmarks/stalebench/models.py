"""Models of many runs at once: each parameter has a first dimension of runs.

A model is a chain of layers, so that a stage is some layers after one another. Activations are
(runs, rows, ...). What a layer passes on may be two tensors, such as a residual and the inner
activations of its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Parameters = list[Tensor]


@dataclass(frozen=True)
class Layer:
    """shapes: of the parameters of one run, with the deviation of the initial values.

    A deviation of -1 stands for ones. run: of the parameters, each with a dimension of runs in
    front, and of what the layer before passes on.
    """

    shapes: tuple[tuple[tuple[int, ...], float], ...]
    run: Callable[[Parameters, Any], Any]


def matmul(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Return x w + b for each run; x: (runs, ..., inputs)."""
    flat = x.flatten(1, -2)
    y = torch.bmm(flat, w) if b is None else torch.baddbmm(b[:, None], flat, w)
    return y.unflatten(1, x.shape[1:-1])


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """Return x with mean 0 and deviation 1, times a gain of each run."""
    scale = gain.view(len(gain), *[1] * (x.dim() - 2), -1)
    return functional.layer_norm(x, x.shape[-1:]) * scale


def linear(
    inputs: int, outputs: int, gain: float = 1.0
) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Return the shapes of a linear layer."""
    return ((inputs, outputs), gain / math.sqrt(inputs)), ((outputs,), 0.0)


def residual(width: int, blocks: int) -> Iterator[Layer]:
    """Yield two layers for each block x + W2 gelu(W1 norm(x))."""

    def up(p: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, functional.gelu(matmul(norm(x, p[0]), p[1], p[2]))

    def down(p: Parameters, given: tuple[Tensor, Tensor]) -> Tensor:
        x, inner = given
        return x + matmul(inner, p[0], p[1])

    for _ in range(blocks):
        yield Layer((((width,), -1.0), *linear(width, width)), up)
        yield Layer(linear(width, width, 0.3), down)


def fused(first: Layer, second: Layer) -> Layer:
    """Return both layers as one."""
    count = len(first.shapes)
    return Layer(
        first.shapes + second.shapes,
        lambda p, x: second.run(p[count:], first.run(p[:count], x)),
    )


def capped(stem: Layer, inner: list[Layer], head: Layer) -> list[Layer]:
    """Return the inner layers, the first with the stem and the last with the head."""
    return [fused(stem, inner[0]), *inner[1:-1], fused(inner[-1], head)]


def mlp(features: int = 64, width: int = 32, classes: int = 10) -> list[Layer]:
    """Return 32 layers: 16 residual blocks."""
    stem = Layer(linear(features, width), lambda p, x: matmul(x, *p))
    head = Layer(linear(width, classes, 0.3), lambda p, x: matmul(x, *p))
    return capped(stem, list(residual(width, 16)), head)


def cnn(channels: int = 16, classes: int = 10) -> list[Layer]:
    """Return 16 residual layers of 3 x 3 convolutions on 4 x 4 places, of images of 8 x 8."""

    def patches(x: Tensor, stride: int) -> Tensor:
        """(runs, rows, h, w, c) to (runs, rows, h', w', 9 c)."""
        high, wide = x.shape[2:4]
        padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
        parts = [
            padded[:, :, i : i + high : stride, j : j + wide : stride]
            for i in range(3)
            for j in range(3)
        ]
        return torch.cat(parts, -1)

    def stem(p: Parameters, x: Tensor) -> Tensor:
        return matmul(patches(x.unflatten(2, (8, 8, 1)), 2), *p)

    def convolve(p: Parameters, x: Tensor) -> Tensor:
        return x + matmul(patches(functional.relu(norm(x, p[0])), 1), p[1], p[2])

    inner = [
        Layer((((channels,), -1.0), *linear(9 * channels, channels, 0.5)), convolve)
        for _ in range(16)
    ]
    head = Layer(linear(16 * channels, classes, 0.3), lambda p, x: matmul(x.flatten(2), *p))
    return capped(Layer(linear(9, channels), stem), inner, head)


def clicks(fields: int, ids: int, size: int = 8, width: int = 32) -> list[Layer]:
    """Return 16 layers: embeddings of ids, 8 residual blocks, and one logit."""

    def stem(p: Parameters, x: Tensor) -> Tensor:
        table, w, b = p
        runs = len(table)
        first = torch.arange(runs).view(-1, 1, 1) * (fields * ids)
        found = functional.embedding(x + first, table.reshape(runs * fields * ids, size))
        return matmul(found.flatten(2), w, b)

    shapes = (((fields * ids, size), 0.1), *linear(fields * size, width))
    head = Layer(linear(width, 1, 0.3), lambda p, x: matmul(x, *p))
    return capped(Layer(shapes, stem), list(residual(width, 8)), head)


def gpt(symbols: int = 256, length: int = 64, width: int = 160, blocks: int = 8) -> list[Layer]:
    """Return two layers for each block of a transformer: causal attention and an MLP."""
    heads = width // 32

    def stem(p: Parameters, x: Tensor) -> Tensor:
        table, places = p
        runs = len(table)
        first = torch.arange(runs).view(-1, 1, 1) * symbols
        found = functional.embedding(x + first, table.reshape(runs * symbols, width))
        return found + places[:, None, : x.shape[-1]]

    def attend(p: Parameters, x: Tensor) -> Tensor:
        parts = matmul(norm(x, p[0]), p[1]).unflatten(-1, (3, heads, 32)).movedim(-3, 0)
        q, k, v = (part.flatten(0, 1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + matmul(mixed.transpose(1, 2).reshape(x.shape), p[2])

    def feed(p: Parameters, x: Tensor) -> Tensor:
        return x + matmul(functional.gelu(matmul(norm(x, p[0]), p[1])), p[2])

    def inner() -> Iterator[Layer]:
        gain, small = ((width,), -1.0), 1 / math.sqrt(width)
        for _ in range(blocks):
            yield Layer((gain, ((width, 3 * width), small), ((width, width), 0.3 * small)), attend)
            shapes = ((width, 4 * width), small), ((4 * width, width), 0.15 * small)
            yield Layer((gain, *shapes), feed)

    shapes = ((symbols, width), 0.1), ((length, width), 0.02)
    head_shapes = ((width,), -1.0), ((width, symbols), 0.5 / math.sqrt(width))
    head = Layer(head_shapes, lambda p, x: matmul(norm(x, p[0]), p[1]))
    return capped(Layer(shapes, stem), list(inner()), head)
