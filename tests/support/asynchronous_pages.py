"""Write the table and the outputs of commands in ``fxpart/docs/asynchronous_training.md``.

python tests/support/asynchronous_pages.py
"""

from __future__ import annotations

import re
import tempfile
from contextlib import chdir
from pathlib import Path

from schedule_pages import BLOCK, printed

from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_copies import count_weight_copies
from fxpart.schedule.weight_modes import MODES, WeightMode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "fxpart" / "docs" / "asynchronous_training.md"
EXAMPLE = "examples/asynchronous.py"
_OUTPUT = re.compile(r"(<!-- output: modes -->\n).*?(<!-- /output -->)", re.DOTALL)
STAGES = 4

_SOURCES = {
    "flush": "every synchronous schedule",
    "lookahead": "the control",
    "stash": "PipeDream",
    "vertical": "PipeDream, vertical sync",
    "2bw": "PipeDream-2BW",
    "2bw-ef": "error feedback (arXiv 2606.30634)",
    "naive": "PACI with a > 1 (arXiv 2606.07881)",
    "spectrain": "SpecTrain",
    "spectrain-v2": "SpecTrain, one horizon",
    "pipeoptim": "PipeOptim",
    "xpipe": "XPipe",
    "pipemare": "PipeMare",
    "nadam-stash": "NAdam for asynchronous pipelines",
}


def filled(text: str) -> str:
    """The page with its outputs."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path(EXAMPLE).parent.mkdir()
        Path(EXAMPLE).write_text((ROOT / EXAMPLE).read_text("utf-8"), encoding="utf-8")
        text = BLOCK.sub(lambda m: f"{m[1]}{m[2]}\n{printed(m[2])}{m[4]}", text)
        return _OUTPUT.sub(lambda m: f"{m[1]}{table()}{m[2]}", text)


def table() -> str:
    """The modes as a table of Markdown."""
    lines = [
        "| weights | forward reads | backward reads | copies at stage 0 .. 3 | source |",
        "|---|---|---|---|---|",
    ]
    for name, mode in MODES.items():
        row = (
            f"`{name}`", mode.forward_reads, mode.backward_reads, resident(mode), _SOURCES[name],
        )  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def resident(mode: WeightMode) -> str:
    """Copies at each stage of a chain, with what a computation makes for itself."""
    if mode.flush and not mode.predicts:
        return " ".join("1" * STAGES)
    every = STAGES if mode.base == "delayed" else 1
    versions = WeightVersionCounters(count_chain_warmup(STAGES), every)
    found = [count_weight_copies(mode, versions, stage) for stage in range(STAGES)]
    words = " ".join(str(each.kept + each.transient) for each in found)
    return words + (" and δ" if any(each.deltas for each in found) else "")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
