"""What a backward costs more where it is split in two, as zero-bubble schedules do.

    python tests/benchmarks/split_backward.py      (--repeat 30)

A stage of transformer layers of several widths runs whole and split backwards in turn, in one
process with one thread; seconds of its CPU are counted. "microseconds_per_product" is the
difference of the medians over the
deferred products: the planner's price of one (fxpart/pricing/split_costs.py) is a constant.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from record import parser, write

SIZES = ((16, 4), (64, 32), (256, 128), (512, 256))  # width and tokens of a sequence
LAYERS, ROWS = 4, 2


def measure(width: int, tokens: int, repeat: int) -> dict[str, Any]:
    """One row: seconds of whole and split backwards of one stage."""
    import torch
    from torch import nn

    from fxpart.runtime.executor.split_backward import BackwardSplitter

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, batch_first=True, activation="gelu"
    )
    stage = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    products = sum(isinstance(one, nn.Linear) for one in stage.modules()) + LAYERS  # q, k, v
    splitter = BackwardSplitter(stage)
    seconds: dict[str, list[float]] = {"whole": [], "first": [], "second": []}
    for _ in range(repeat + 3):
        x = torch.randn(ROWS, tokens, width, requires_grad=True)
        output = stage(x)
        gradient = torch.ones_like(output)
        begin = time.process_time()
        output.backward(gradient)
        seconds["whole"].append(time.process_time() - begin)
        x = torch.randn(ROWS, tokens, width, requires_grad=True)
        output = stage(x)
        begin = time.process_time()
        rest = splitter.first([output], [gradient], [x])
        between = time.process_time()
        assert rest is not None, "there are products to defer"
        rest.run()
        seconds["first"].append(between - begin)
        seconds["second"].append(time.process_time() - between)
    whole, first, second = (median(seconds[name][3:]) for name in ("whole", "first", "second"))
    return {
        "width": width,
        "tokens": tokens,
        "products": products,
        "whole_seconds": whole,
        "split_over_whole": (first + second) / whole,
        "second_half": second / (first + second),
        "microseconds_per_product": 1e6 * (first + second - whole) / products,
    }


def main() -> None:
    """Measure all sizes."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--repeat", type=int, default=30, help="backwards of each kind")
    options = options_parser.parse_args()
    import torch

    torch.set_num_threads(1)
    write("split_backward", [measure(*size, options.repeat) for size in SIZES], options)


if __name__ == "__main__":
    main()
