"""Write the tables about learning from the results of `learning.py`.

    python tests/benchmarks/learning_page.py     (--dry prints the page)

One table for each task, and whether the aim is reached: a predicting mode within 0.5 % of the
synchronous accuracy. The page is RESULTS.md; the figure, learning.svg, is one setting.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from learning_jobs import CUT, METHODS, SEEDS, STAGES, Job, at, best_rate, configurations
from readme import replaced
from readme_figures import conditions
from record import HERE, ROOT, parser, read

from fxpart.schedule.weight_modes import MODES

PAGE = HERE / "RESULTS.md"
FIGURE = ROOT / "fxpart" / "docs" / "images" / "learning.svg"
SHOWN = ("gpt", "adamw", 8)  # of the figure
WITHIN = 0.995  # of the synchronous accuracy
_MODES = {name: MODES[method.weights] for name, method in METHODS.items()}
PREDICTING = tuple(name for name, mode in _MODES.items() if mode.predicts and not mode.flush)
TITLES = {
    "mlp": "Digits, an MLP of residual blocks",
    "cnn": "Digits, a residual CNN",
    "gpt": "Source text, a character GPT",
    f"gpt{CUT}": "The character GPT, each batch in K microbatches",
}
LABELS = {
    "sync": "synchronous",
    "lookahead": "synchronous, look-ahead",
    "stash": "stash (PipeDream)",
    "naive": "naive",
    "spectrain": "SpecTrain v1",
    "spectrain-v2": "SpecTrain v2",
    "pipeoptim": "PipeOptim",
    "xpipe": "XPipe",
    "2bw": "PipeDream-2BW",
    "pipemare": "PipeMare",
    "nadam-stash": "stash, NAdam β1 = .99",
}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


@dataclass(frozen=True)
class Found:
    """All seeds of a configuration at its best rate; None in the lists where a run diverged."""

    rate: float
    keys: tuple[str, ...]
    losses: tuple[float | None, ...]
    accuracies: tuple[float | None, ...]

    @property
    def accuracy(self) -> float:
        """The mean; 0 where a run diverged."""
        return _mean(self.accuracies) or 0.0


def found(figures: Mapping[str, Any], job: Job) -> Found | None:
    """What is known of a configuration; None while runs are missing."""
    runs = figures["runs"]
    rate = best_rate(job, figures["tasks"][job.task]["rates"][job.optimizer], runs)
    if rate is None:
        return None
    keys = tuple(at(job, rate, seed).key for seed in SEEDS)
    if not runs.keys() >= set(keys):
        return None
    losses, accuracies = (tuple(runs[k][what] for k in keys) for what in ("loss", "accuracy"))
    return Found(rate, keys, losses, accuracies)


def known(figures: Mapping[str, Any], task: str) -> dict[tuple[str, str, int], Found]:
    """By method, optimizer and stages; the synchronous run and NAdam fill all their columns."""
    all_of: dict[tuple[str, str, int], Found] = {}
    for job in configurations([task]):
        has = found(figures, job)
        if has is not None:
            column = "adamw" if job.optimizer == "nadam" else job.optimizer
            for stages in STAGES if job.stages == 1 else (job.stages,):
                all_of[job.method, column, stages] = has
    return all_of


def table(figures: Mapping[str, Any], task: str) -> str:
    """Methods by optimizers and stages."""
    has = known(figures, task)
    head = [f"{name}, K = {stages}" for name in OPTIMIZERS.values() for stages in STAGES]
    rows = [f"| method | {' | '.join(head)} |", f"| --- |{' --- |' * len(head)}"]
    for method, label in LABELS.items():
        cells = [
            cell(has.get((method, *at)), has.get(("sync", *at)), missing(method, at[0]))
            for at in product(OPTIMIZERS, STAGES)
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    said = figures["tasks"][task]
    about = (
        f"{said['data']}; {said['parameters']:,} parameters, batches of {said['rows']},"
        f" {said['steps']} updates"
    )
    return "\n".join([f"### {TITLES[task]}", "", f"{about[0].upper()}{about[1:]}.", "", *rows])


def missing(method: str, optimizer: str) -> str:
    """The text of a cell without results."""
    takes = METHODS[method].optimizers
    return "" if optimizer in takes or (optimizer, takes) == ("adamw", ("nadam",)) else "-"


def cell(has: Found | None, sync: Found | None, otherwise: str) -> str:
    """Accuracy in percent; bold where it is near the synchronous one or above."""
    if has is None:
        return otherwise
    if None in has.losses:
        return f"{has.losses.count(None)} of {len(has.losses)} diverged ({has.rate:g})"
    accuracy = f"{100 * has.accuracy:.2f}±{100 * _spread(has.accuracies):.2f}"
    near = sync is not None and has.accuracy >= WITHIN * sync.accuracy
    return f"**{accuracy}**" if near else accuracy


def _mean(values: tuple[float | None, ...]) -> float | None:
    """None where one is missing."""
    there = [v for v in values if v is not None]
    return statistics.fmean(there) if len(there) == len(values) else None


def _spread(values: tuple[float | None, ...]) -> float:
    """The sample's standard deviation."""
    return statistics.stdev(v for v in values if v is not None)


# -- the aim --------------------------------------------------------------------------------------


def settings(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, int, dict[str, float] | None]]:
    """Each task, optimizer and stages: accuracy of predicting modes over the synchronous one."""
    for task in figures["tasks"]:
        has = known(figures, task)
        for name in OPTIMIZERS:
            for stages in STAGES:
                sync = has.get(("sync", name, stages))
                mine = {m: has.get((m, name, stages)) for m in PREDICTING}
                whole = sync is not None and all(f is not None for f in mine.values())
                yield task, name, stages, {
                    m: f.accuracy / sync.accuracy for m, f in mine.items() if f and sync
                } if whole else None  # fmt: skip


def aim(figures: Mapping[str, Any]) -> str:
    """Whether a predicting mode is within 0.5 % of the synchronous accuracy, and where."""
    every = list(settings(figures))
    lines = []
    for task in TITLES:
        mine = [(name, stages, ratios) for t, name, stages, ratios in every if t == task]
        done = [(name, stages, ratios) for name, stages, ratios in mine if ratios]
        if not mine or len(done) < len(mine):
            lines.append(f"* {TITLES[task]}: not all runs are complete.")
            continue
        near = [max(ratios.values()) >= WITHIN for _, _, ratios in done]
        best = "; ".join(
            f"{OPTIMIZERS[name]}, K = {stages}: {LABELS[max(ratios, key=lambda m: ratios[m])]}"
            f" {100 * (max(ratios.values()) - 1):+.2f} %"
            for name, stages, ratios in done
        )
        lines.append(f"* {TITLES[task]}: true in {sum(near)} of {len(near)} settings. {best}.")
    words = "; ".join(f"with {label}: {verdict(every, name)}" for name, label in OPTIMIZERS.items())
    return "\n".join(
        [
            "Is at least one predicting mode (SpecTrain v1 or v2, PipeOptim, XPipe) within 0.5 % of"
            " the synchronous validation accuracy on each task, at 4 and at 8 stages? Either one or"
            f" K microbatches per batch may reach it. {words[0].upper()}{words[1:]}."
            " The best mode in each setting, relative to the synchronous run with the same"
            " optimizer:",
            "",
            *lines,
        ]
    )


def verdict(every: Sequence[tuple[str, str, int, dict[str, float] | None]], optimizer: str) -> str:
    """On which tasks the aim holds at all numbers of stages, whole or cut, with an optimizer."""
    holds: dict[str, list[bool]] = {}
    for task, name, _, ratios in every:
        if name == optimizer:
            near = ratios is not None and max(ratios.values()) >= WITHIN
            holds.setdefault(task, []).append(near)
    names = [task for task in TITLES if not task.endswith(CUT)]
    kept = [n for n in names if any(all(holds.get(task, [False])) for task in (n, f"{n}{CUT}"))]
    missing = any(ratios is None for _, name, _, ratios in every if name == optimizer)
    if missing or set(TITLES) > set(holds):
        return "not known yet"
    held = len(kept) == len(names)
    return "**true**" if held else f"**false**, on {len(kept)} of {len(names)} tasks"


# -- the figure -----------------------------------------------------------------------------------


def figure(figures: Mapping[str, Any]) -> str:
    """Training losses of one setting as an SVG, the mean of all seeds; "" where no run is there."""
    from fxpart.emulator.loss_plot import losses_svg, mean_curve

    task, optimizer, stages = SHOWN
    every = known(figures, task) if task in figures["tasks"] else {}
    lines = []
    for method, label in LABELS.items():
        has = every.get((method, optimizer, stages))
        if has is not None and None not in has.losses:
            curves = [figures["runs"][key]["curve"] for key in has.keys]
            each = figures["tasks"][task]["steps"] // len(curves[0])
            long = [[value for value in curve for _ in range(each)] for curve in curves]
            lines.append(mean_curve(label, long))
    title = f"{TITLES[task]}: {OPTIMIZERS[optimizer]}, K = {stages}"
    label = "training loss, mean of seeds"
    return losses_svg(lines, title, window=1, label=label) if lines else ""


def contents() -> dict[str, str]:
    """The page's generated blocks by name."""
    result = read("learning")
    figures = result["figures"]
    made = f"Made by `{result['command']}`: {conditions(result)}."
    tables = [table(figures, task) for task in TITLES if task in figures["tasks"]]
    where = f"../../fxpart/docs/images/{FIGURE.name}"
    drawn = f"![Training losses by method]({where})" if figure(figures) else ""
    return {"aim": aim(figures), "learning": "\n\n".join([*tables, made]), "figure": drawn}


def rewrite() -> None:
    """Bring the page and its figure up to the results."""
    text = replaced(PAGE.read_text(encoding="utf-8"), contents())
    for path, new in ((PAGE, text), (FIGURE, figure(read("learning")["figures"]))):
        if new:
            beside = path.with_suffix(".part")
            beside.write_text(new, encoding="utf-8")
            os.replace(beside, path)


def main() -> None:
    """Write the page."""
    if parser(__doc__).parse_args().dry:
        sys.stdout.write(replaced(PAGE.read_text(encoding="utf-8"), contents()))
    else:
        rewrite()


if __name__ == "__main__":
    main()
