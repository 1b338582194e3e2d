"""What a prediction costs beside the optimizer's step, and what it allocates.

    python tests/benchmarks/predicting.py

A model of the given number of parameters, half of it in one matrix and the rest in many of the size
of a layer's, with SGD and momentum, and Adam as torch steps it by default and fused. The step and
each rule's prediction 3 updates ahead are made in turn on one thread and measured in its time on
the processor, so that others on the machine disturb little; "over_step" is the median over rounds
of prediction over step. Much of a prediction's time goes into memory that the system has to give:
"copy_ms" is that of new tensors with the weights' numbers. "allocated" is the peak of bytes that a
prediction allocates over those of the weights: 1 is the result alone. "held" is what the predictor
keeps between calls, over the same.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from record import parser as benchmark_parser
from record import write
from torch import nn
from transient_bytes import Peak

from fxpart.runtime.weight_prediction import RULES, Predictor, make_predictor

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
    "adam_fused": partial(torch.optim.Adam, lr=1e-4, fused=True),
}
AHEAD = 3


def model(millions: float) -> list[nn.Parameter]:
    """Parameters of so many millions of numbers, with gradients."""
    total = int(millions * 1e6)
    large = nn.Parameter(torch.randn(total // 2))
    layer = min(1 << 20, total // 8)
    rest = [nn.Parameter(torch.randn(layer)) for _ in range((total - total // 2) // layer)]
    for p in (large, *rest):
        p.grad = torch.randn_like(p) * 1e-3
    return [large, *rest]


def spread(look: Predictor, updates: int) -> float:
    """The most bytes at a time that a prediction allocates, over those of the weights."""
    peak = Peak()
    with peak:
        made = look.predict(updates)
    return peak.most / sum(t.nbytes for t in made)


def seconds(call: Callable[[], object]) -> float:
    """The processor's time for a call; what it returns is freed outside of it."""
    start = time.thread_time()
    answer = call()
    taken = time.thread_time() - start
    del answer
    return taken


def copied(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """New tensors with the same numbers."""
    return [p.detach().clone() for p in weights]


def ratios(name: str, millions: float, rounds: int) -> dict[str, object]:
    """Times of each rule's prediction over that of the step, and its memory."""
    weights = model(millions)
    optimizer = OPTIMIZERS[name](weights)
    rules = {rule: make_predictor(rule, optimizer) for rule in RULES}
    size = sum(p.nbytes for p in weights)
    for look in rules.values():
        look.before_update()
    optimizer.step()
    for look in rules.values():
        look.after_update()
    found: dict[str, object] = {}
    for rule in list(rules):
        look = rules.pop(rule)
        look.predict(AHEAD)
        copies = [seconds(partial(copied, weights)) for _ in range(rounds)]
        pairs = [
            (seconds(optimizer.step), seconds(partial(look.predict, AHEAD))) for _ in range(rounds)
        ]
        found[rule] = {
            "over_step": round(statistics.median(p / s for s, p in pairs), 3),
            "step_ms": round(1e3 * statistics.median(s for s, _ in pairs), 2),
            "copy_ms": round(1e3 * statistics.median(copies), 2),
            "predict_ms": round(1e3 * statistics.median(p for _, p in pairs), 2),
            "allocated": round(spread(look, AHEAD), 3),
            "held": round(look.state_bytes() / size, 2),
        }
        del look
        gc.collect()
    return found


def main() -> None:
    """Each optimizer at each size."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10, 100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, dict[str, object]] = {}
    for name in OPTIMIZERS:
        figures[name] = {}
        for millions in options.millions:
            rounds = options.rounds * 5 if millions < 10 else options.rounds
            figures[name][f"{millions:g}M"] = ratios(name, millions, rounds)
            gc.collect()
    write("predicting", figures, options)


if __name__ == "__main__":
    main()
