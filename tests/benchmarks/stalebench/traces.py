"""Golden traces of pipelines without flushes: every weight mode, in plain Python doubles.

    python tests/benchmarks/stalebench/traces.py             (writes traces.json beside this file)

The oracle is this file alone: it imports neither torch nor fxpart, so that any implementation, in
any language, can be compared with the traces. Everything is given by formulas:

* Stage k of K computes h_k = tanh(w_k h_(k-1) + b_k), from w_k = 0.9 + 0.05 k, b_k = 0.1 - 0.02 k.
* Sample t = 1, 2, ... is h_(-1) = sin(t) with the target y = cos(2 t) / 2; its loss is
  (h_(K-1) - y)^2 / 2.
* A microbatch is one sample; a minibatch has ``a`` of them, and its loss is their mean.
* Asynchronous 1F1B: with t the number of a microbatch, its forward on stage k runs after
  u_f = floor(max(0, t - (K - k)) / a) updates of the stage, its backward after
  u_b = floor((t - 1) / a).
* The gradient of w_k takes h of the forward; that of h_(k-1) takes w_k of the backward.
* A mode's name may end with another rule of prediction than "linear": "spectrain-v2+difference".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("traces.json")
UPDATES = 24
DECAY = math.exp(-2)  # PipeMare's D
Pair = tuple[float, float]  # w and b of a stage
DELAYED = ("2bw", "2bw-ef")  # They need as many microbatches per update as stages.
MODES = (
    "flush", "lookahead", "stash", "vertical", "naive", "spectrain", "spectrain-v2", "pipeoptim",
    "xpipe", "pipemare", *DELAYED, "nadam-stash", "spectrain-v2+difference",
    "spectrain-v2+decaying",
)  # fmt: skip


class Version(NamedTuple):
    """A stage's weights after some updates, with the optimizer's state for each of the two.

    moved: PipeMare's mean movement of an update; with error feedback, the update itself.
    """

    weights: Pair
    state: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    moved: Pair | None = None


class Read(NamedTuple):
    """What a microbatch reads on a stage.

    version: updates in the weights of its forward; ahead: by how many more they are predicted.
    after: weights of its backward: the "same", those of "now", or those "corrected". back: by how
    many updates the latter are predicted. gap: updates between the two.
    """

    version: int
    ahead: int = 0
    after: str = "same"
    back: int = 0
    gap: int = 0


def read(mode: str, k: int, stages: int, a: int, t: int) -> Read:
    """Return what microbatch t, counted from 1, reads on stage k."""

    def u_f(stage: int, t: int) -> int:
        return max(0, t - (stages - stage)) // a

    def u_b(t: int) -> int:
        return (t - 1) // a

    gap, most = u_b(t) - u_f(k, t), u_b(t) - u_f(0, t)
    first = (t - 1) // a * a + 1  # The first microbatch of its minibatch.
    later = t + stages * a  # A microbatch like it, once the pipeline is full.
    full, deepest = u_b(later) - u_f(k, later), u_b(later) - u_f(0, later)
    rows = {
        "flush": Read(u_b(t)),
        "lookahead": Read(u_b(t), full + (deepest - full) // 2),
        "stash": Read(u_f(k, t)),
        "vertical": Read(u_f(0, t)),
        "naive": Read(u_f(k, t), 0, "now"),
        "spectrain": Read(u_f(k, t), gap + (most - gap) // 2, "now", (most - gap) // 2),
        "spectrain-v2": Read(u_f(k, t), gap),
        "pipeoptim": Read(u_f(k, t), gap, "now"),
        "xpipe": Read(u_f(k, first), u_b(first) - u_f(k, first)),
        "pipemare": Read(u_f(k, t), 0, "corrected", gap=gap),
    }
    rows |= dict.fromkeys(DELAYED, Read(max(0, u_b(t) - 1)))
    rows["nadam-stash"] = rows["stash"]
    return rows[mode.partition("+")[0]]


class Sgd(NamedTuple):
    """v <- m v + g, the first v being g; w <- w - lr v. Predicted: w - s lr v."""

    rate: float = 0.1
    momentum: float = 0.9

    def update(
        self, w: float, g: float, state: tuple[float, ...], rate: float
    ) -> tuple[float, tuple[float, ...]]:
        """Return the weight and the state after an update."""
        v = self.momentum * state[0] + g if state else g
        return w - rate * v, (v,)

    def predict(self, w: float, state: tuple[float, ...], s: int) -> float:
        """Return the weight s updates later."""
        return w - s * self.rate * state[0] if state else w

    def coast(self, w: float, state: tuple[float, ...], s: int) -> float:
        """Return the weight after s updates with gradients of zero."""
        if not state:
            return w
        return w - self.rate * state[0] * sum(self.momentum**i for i in range(1, s + 1))


class AdamW(NamedTuple):
    """Adam with decoupled decay. Predicted: with the last direction and the decay of s updates."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.01

    def update(
        self, w: float, g: float, state: tuple[float, ...], rate: float
    ) -> tuple[float, tuple[float, ...]]:
        """Return the weight and the state after an update."""
        m, v, n = state or (0.0, 0.0, 0.0)
        m, v, n = m + (g - m) * (1 - self.beta1), self.beta2 * v + (1 - self.beta2) * g * g, n + 1
        return w * (1 - rate * self.decay) - rate * self._direction(m, v, n), (m, v, n)

    def predict(self, w: float, state: tuple[float, ...], s: int) -> float:
        """Return the weight s updates later."""
        if not state:
            return w
        return w * (1 - s * self.rate * self.decay) - s * self.rate * self._direction(*state)

    def coast(self, w: float, state: tuple[float, ...], s: int) -> float:
        """Return the weight after s updates with gradients of zero."""
        for _ in range(s if state else 0):
            w, state = self.update(w, 0.0, state, self.rate)
        return w

    def _direction(self, m: float, v: float, n: float) -> float:
        root = math.sqrt(v) / math.sqrt(1 - self.beta2**n) + self.epsilon
        return m / (1 - self.beta1**n) / root


class NAdam(NamedTuple):
    """Adam with Nesterov momentum, whose decay rises to beta1; for a mode that does not predict."""

    rate: float = 0.01
    beta1: float = 0.99
    beta2: float = 0.999
    epsilon: float = 1e-8
    rise: float = 0.004

    def update(
        self, w: float, g: float, state: tuple[float, ...], rate: float
    ) -> tuple[float, tuple[float, ...]]:
        """Return the weight and the state after an update."""
        m, v, n, product = state or (0.0, 0.0, 0.0, 1.0)
        m, v, n = m + (g - m) * (1 - self.beta1), self.beta2 * v + (1 - self.beta2) * g * g, n + 1
        mu, coming = self._momentum(n), self._momentum(n + 1)
        product *= mu
        root = math.sqrt(v / (1 - self.beta2**n)) + self.epsilon
        step = g * (1 - mu) / (1 - product) + m * coming / (1 - product * coming)
        return w - rate * step / root, (m, v, n, product)

    def _momentum(self, n: float) -> float:
        return self.beta1 * (1 - 0.5 * 0.96 ** (n * self.rise))


Optimizer = Sgd | AdamW | NAdam
OPTIMIZERS: dict[str, Optimizer] = {"sgd": Sgd(), "adamw": AdamW(), "nadam": NAdam()}


def trace(mode: str, stages: int, a: int, optimizer: str) -> dict[str, object]:
    """Return the loss of each minibatch, and the weights after all updates."""
    rule, every = OPTIMIZERS[optimizer], range(stages)
    kept = [[Version((0.9 + 0.05 * k, 0.1 - 0.02 * k))] for k in every]
    losses = []
    for number in range(UPDATES):
        sums, loss = [(0.0, 0.0)] * stages, 0.0
        for t in range(number * a + 1, number * a + a + 1):
            rows = [read(mode, k, stages, a, t) for k in every]
            how = mode.partition("+")[2]
            forward = [
                _predict(rule, kept[k], row.version, row.ahead, how) for k, row in enumerate(rows)
            ]
            backward = [
                _find_backward(rule, kept[k], row, forward[k], how) for k, row in enumerate(rows)
            ]
            hidden = [math.sin(t)]
            for w, b in forward:
                hidden.append(math.tanh(w * hidden[-1] + b))
            error = hidden[-1] - math.cos(2 * t) / 2
            loss += error * error / 2 / a
            slope = error / a
            for k in reversed(every):
                inner = slope * (1 - hidden[k + 1] ** 2)
                sums[k] = sums[k][0] + inner * hidden[k], sums[k][1] + inner
                slope = inner * backward[k][0]
        losses.append(loss)
        for k in every:
            kept[k].append(_update(mode, rule, kept[k], sums[k], _find_gap(k, stages, a)))
    return {"losses": losses, "weights": [list(mine[-1].weights) for mine in kept]}


def _predict(rule: Optimizer, versions: list[Version], number: int, s: int, how: str) -> Pair:
    version = versions[number]
    if not s or not number:
        return version.weights
    if how == "difference":
        pairs = zip(version.weights, versions[number - 1].weights, strict=True)
        w, b = (new + s * (new - old) for new, old in pairs)
        return w, b
    each = rule.coast if how == "decaying" else rule.predict
    w, b = (each(x, y, s) for x, y in zip(version.weights, version.state, strict=True))
    return w, b


def _find_backward(
    rule: Optimizer, versions: list[Version], row: Read, forward: Pair, how: str
) -> Pair:
    newest = versions[-1]
    if row.after == "same":
        return forward
    if row.after == "now":
        return _predict(rule, versions, len(versions) - 1, row.back, how)
    if not row.gap or newest.moved is None:
        return newest.weights
    w, b = (x - row.gap * d for x, d in zip(newest.weights, newest.moved, strict=True))
    return w, b


def _find_gap(k: int, stages: int, a: int) -> int:
    """Return the largest staleness of stage k once the pipeline is full."""
    return -(-(stages - 1 - k) // a)


def _update(
    mode: str, rule: Optimizer, versions: list[Version], gradient: Pair, gap: int
) -> Version:
    before, number = versions[-1], len(versions) - 1
    rate = rule.rate
    if mode == "pipemare":  # T1: divided by a power of the staleness that falls from 1 to 0.
        rate /= max(gap, 1) ** (1.0 - min(number / UPDATES, 1.0))
    done = [
        rule.update(w, g, state, rate)
        for w, g, state in zip(before.weights, gradient, before.state, strict=True)
    ]
    weights, state = (done[0][0], done[1][0]), (done[0][1], done[1][1])
    if mode == "pipemare" and gap:  # T2: the mean movement of an update.
        gamma, past = DECAY ** (1 / gap), before.moved or (0.0, 0.0)
        moves = zip(past, before.weights, weights, strict=True)
        w, b = (gamma * d + (1 - gamma) * (new - old) for d, old, new in moves)
        return Version(weights, state, (w, b))
    if mode == "2bw-ef":  # The error of each late update is added to the next.
        moved = before.weights[0] - weights[0], before.weights[1] - weights[1]
        if before.moved is not None:
            w, b = (x + p - m for x, p, m in zip(weights, before.moved, moved, strict=True))
            weights = (w, b)
        return Version(weights, state, moved)
    return Version(weights, state)


def list_settings() -> Iterator[tuple[str, int, int, str]]:
    """Yield (mode, stages, microbatches of a minibatch, optimizer) of every trace."""
    for mode in MODES:
        for stages in (2, 4, 8):
            for a in (stages,) if mode in DELAYED else (1, 2):
                for optimizer in ("nadam",) if mode == "nadam-stash" else ("sgd", "adamw"):
                    yield mode, stages, a, optimizer


def main() -> None:
    """Write all traces."""
    found = {"/".join(map(str, each)): trace(*each) for each in list_settings()}
    FILE.write_text(json.dumps(found, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
