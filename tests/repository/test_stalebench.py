"""StaleBench: its trainer follows the golden traces, it resumes, and its page is its results."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.stalebench import claims, design, intervals, methods, models, optimizers, traces
from benchmarks.stalebench.design import Cell
from benchmarks.stalebench.methods import Method
from benchmarks.stalebench.models import Layer, matmul
from benchmarks.stalebench.trainer import Run, Trainer

from fxpart.optim import Muon

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
CELL = Cell("digits", "sgd", 8)
RATES = {"sgd": 0.1, "adamw": 0.01}


@pytest.fixture(scope="module")
def stalebench() -> Iterator[Any]:
    """Return modules that import others of tests/benchmarks by name."""
    path, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    own = {name: f"benchmarks.stalebench.{name}" for name in ("page", "run", "summary")}
    names = own | {"readme": "readme", "record": "record"}
    yield SimpleNamespace(**{name: importlib.import_module(at) for name, at in names.items()})
    sys.path[:] = path
    beside = {p.stem for p in FOLDER.glob("*.py")} | set(own.values())
    for name in beside & set(sys.modules) - known:
        del sys.modules[name]


# -- the trainer ----------------------------------------------------------------------------------


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().flatten(1).mean(1) / 2


def trainer(stages: int, runs: list[Run], optimizer: str) -> Trainer:
    """The chain of the golden traces, with weights of all runs alike."""
    shapes = ((1, 1), 1.0), ((1,), 1.0)
    layers = [Layer(shapes, lambda p, x: torch.tanh(matmul(x, *p))) for _ in range(stages)]
    make = {"sgd": partial(optimizers.SGD, decay=0.0), "adamw": optimizers.AdamW}[optimizer]
    made = Trainer(
        layers, stages, runs, half_square, optimizer, traces.UPDATES, dtype=torch.float64, make=make
    )
    for k in range(stages):
        made.newest[:, 2 * k], made.newest[:, 2 * k + 1] = 0.9 + 0.05 * k, 0.1 - 0.02 * k
    made.versions = [made.newest.clone()]
    return made


def feed(made: Trainer, a: int) -> None:
    """Train on the samples of the traces. a: of a minibatch."""
    rows, count = len(made.runs), made.microbatches
    for update in range(traces.UPDATES):
        ts = torch.arange(update * a + 1.0, update * a + a + 1, dtype=torch.float64)
        inputs = ts.sin().view(1, a, 1).expand(rows, a, 1)
        targets = ((2 * ts).cos() / 2).view(1, a, 1).expand(rows, a, 1)
        made.step(list(zip(inputs.chunk(count, 1), targets.chunk(count, 1), strict=True)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("stages", "a"), [(4, 2), (8, 1)])
def test_the_trainer_follows_the_golden_traces(
    monkeypatch: pytest.MonkeyPatch, stages: int, a: int, optimizer: str
) -> None:
    """Every mode at once, as rows of the same matrices; delayed modes take the whole minibatch."""
    known = json.loads(traces.FILE.read_text("utf-8"))
    for delayed in (False, True):
        modes = sorted(
            mode
            for mode in traces.MODES
            if (mode in traces.DELAYED) == delayed
            and "decaying" not in mode
            and "nadam" not in mode
        )
        count, each = (1, stages) if delayed else (a, a)
        made_up = {
            mode: Method(mode, base, microbatches=count, rule=rule or "linear")
            for mode in modes
            for base, _, rule in [mode.partition("+")]
        }
        monkeypatch.setattr("benchmarks.stalebench.trainer.METHODS", made_up)
        monkeypatch.setattr(methods, "METHODS", made_up)
        methods.reads.cache_clear()
        made = trainer(stages, [Run(mode, RATES[optimizer], 0) for mode in modes], optimizer)
        feed(made, each)
        losses = torch.stack(made.losses)
        for row, mode in enumerate(modes):
            golden = known[f"{mode}/{stages}/{each}/{optimizer}"]
            assert losses[:, row].tolist() == pytest.approx(golden["losses"], rel=1e-12)
            weights = torch.tensor(golden["weights"], dtype=torch.float64).flatten()
            torch.testing.assert_close(made.newest[row], weights, rtol=1e-12, atol=1e-14)
    methods.reads.cache_clear()


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "adagrad", "muon"])
def test_optimizers_step_as_those_of_torch(name: str) -> None:
    """Two runs with different rates, a matrix (transposed in torch) and a vector.

    fxpart's Muon orthogonalizes in bfloat16.
    """
    torch.manual_seed(0)
    bound = 5e-3 if name == "muon" else 1e-5
    shapes = [(0, (4, 3)), (12, (5,))]
    weights, gradients = torch.randn(2, 17), torch.randn(6, 2, 17)
    reference: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
        "adamw": partial(torch.optim.AdamW, weight_decay=0.01),
        "nadam": partial(
            torch.optim.NAdam, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True
        ),
        "adagrad": torch.optim.Adagrad,
        "muon": partial(Muon, weight_decay=0.01),
    }
    found, rule = weights.clone(), optimizers.OPTIMIZERS[name](weights, shapes)
    for gradient in gradients:
        rule.step(found, gradient, torch.tensor([[0.01], [0.1]]))
    for row, rate in enumerate((0.01, 0.1)):
        own = [weights[row, :12].view(4, 3).T.clone(), weights[row, 12:].clone()]
        parameters = [torch.nn.Parameter(each) for each in own]
        made = reference[name](parameters, lr=rate)
        for gradient in gradients:
            parameters[0].grad = gradient[row, :12].view(4, 3).T.contiguous()
            parameters[1].grad = gradient[row, 12:]
            made.step()
        flat = torch.cat([parameters[0].detach().T.flatten(), parameters[1].detach()])
        torch.testing.assert_close(found[row], flat, rtol=bound, atol=bound)


def test_runs_do_not_depend_on_those_beside_them() -> None:
    runs = [Run("spectrain", 0.1, 0), Run("stash", 0.1, 0), Run("stash", 0.2, 0)]
    together = trainer(4, runs, "sgd")
    feed(together, 1)
    for row, run in enumerate(runs):
        alone = trainer(4, [run], "sgd")
        feed(alone, 1)
        assert alone.newest[0].tolist() == pytest.approx(together.newest[row].tolist(), rel=1e-14)


@pytest.mark.parametrize(
    ("layers", "inputs"),
    [
        (models.mlp(width=8), torch.randn(2, 3, 64)),
        (models.cnn(channels=4), torch.randn(2, 3, 64)),
        (models.clicks(2, 5), torch.randint(10, (2, 3, 2))),
        (models.gpt(length=6, width=32, blocks=2), torch.randint(256, (2, 3, 6))),
    ],
    ids=["mlp", "cnn", "clicks", "gpt"],
)
def test_models_compute_runs_apart(layers: list[Layer], inputs: torch.Tensor) -> None:
    """Each run has its own weights and rows; a causal model does not see what comes later."""
    runs = [Run("sync", 0.1, 0), Run("sync", 0.1, 1)]
    made = Trainer(layers, 2, runs, half_square, "sgd", 1)
    together = made.outputs(made.view(made.newest), inputs)
    for row, run in enumerate(runs):
        one = Trainer(layers, 2, [run], half_square, "sgd", 1)
        alone = one.outputs(one.view(one.newest), inputs[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-5)
    assert not together[0].allclose(together[1])
    if together.dim() == 4:
        inputs[..., -1] = (inputs[..., -1] + 1) % 256
        later = made.outputs(made.view(made.newest), inputs)
        torch.testing.assert_close(later[:, :, :-1], together[:, :, :-1])
        assert not later[:, :, -1].allclose(together[:, :, -1])


def test_a_run_that_diverges_leaves_the_others() -> None:
    runs = [Run("stash", 0.1, 0), Run("stash", math.inf, 0)]
    made = trainer(2, runs, "sgd")
    feed(made, 1)
    assert made.newest[0].isfinite().all() and not made.newest[1].isfinite().all()


def test_staleness_is_that_of_the_schedule() -> None:
    assert methods.staleness("stash", 4) == (3, 2, 1, 0)
    assert methods.staleness("2bw", 4) == (1, 1, 1, 1)
    assert methods.staleness("sync", 4) == methods.staleness("lookahead", 4) == (0, 0, 0, 0)
    assert methods.staleness("paci", 8) == (2, 2, 2, 1, 1, 1, 1, 0)


# -- learning rates and resumption ----------------------------------------------------------------


def losses(shape: Any, rates: tuple[float, ...]) -> dict[float, float]:
    return {rate: shape(math.log2(rate)) for rate in rates}


@pytest.mark.parametrize(
    ("at", "tried", "edge"),
    [
        (0.0, {0.25, 1, 4, 0.5, 2}, False),  # inside: around the middle
        (2.4, {0.25, 1, 4, 8, 16}, False),  # beyond 4: outward
        (5.0, {0.25, 1, 4, 8, 16, 32, 64}, False),  # once more
        (9.0, {0.25, 1, 4, 8, 16, 32, 64}, True),  # and then it is marked
        (-4.0, {0.25, 1, 4, 0.125, 0.0625, 0.03125, 0.015625}, False),
    ],
)
def test_the_grid_moves_with_the_best_rate(at: float, tried: set[float], edge: bool) -> None:
    scores: dict[float, float] = {}
    for number in range(design.ROUNDS):
        scores |= losses(lambda x: (x - at) ** 2, design.propose(1.0, scores, number))
    assert set(scores) == tried
    assert design.is_at_edge(scores) == edge


def complete(results: Any, cell: Cell, row: Any) -> list[Any]:
    """Make all runs of a cell up; the chunks in their order."""
    chunks = []
    while (chunk := next(design.list_ready(results.runs, cell, 0.02), None)) is not None:
        chunks.append(chunk)
        results.add(chunk, [row(*run, chunk.final) for run in chunk.runs], 1.0)
    return chunks


def make_row(method: str, rate: float, seed: int, final: bool) -> Any:
    """Losses of a run: the methods' order of quality, best at rate .02."""
    gap = 0.2 * (method in ("stash", "naive")) + abs(math.log(rate / 0.02))
    loss = 0.5 + gap + 0.001 * (seed % 3) + 1e-4 * (seed % 2) * len(method)
    curve = [loss + 2.0 * (1 - i / 20) for i in range(20)]
    return [loss, loss, 0.9, curve] if final else [loss]


def test_no_run_is_made_twice_and_all_are_made(stalebench: Any, tmp_path: Path) -> None:
    results = stalebench.run.Results(tmp_path / "results.json")
    chunks = complete(results, CELL, make_row)
    keys = [key for chunk in chunks for key in chunk.keys]
    assert len(keys) == len(set(keys)) == design.count_runs(CELL)
    for chunk in chunks:  # a chunk of final runs has all its methods at the same seeds
        names = {name for name, _, _ in chunk.runs}
        seeds = {seed for _, _, seed in chunk.runs}
        assert not chunk.final or len(chunk.runs) == len(names) * len(seeds)
        assert not seeds & set(design.FINALS) if not chunk.final else seeds <= set(design.FINALS)
    results.write("2026-01-01")
    again = stalebench.run.Results(tmp_path / "results.json")
    assert again.runs == results.runs
    assert not list(design.list_ready(again.runs, CELL, 0.02))


def test_a_stopped_benchmark_resumes(stalebench: Any, tmp_path: Path) -> None:
    results = stalebench.run.Results(tmp_path / "results.json")
    every = complete(results, CELL, make_row)
    for stop in (1, 5, len(every) - 1):
        results = stalebench.run.Results(tmp_path / f"{stop}.json")
        for chunk in every[:stop]:
            results.add(chunk, [make_row(*run, chunk.final) for run in chunk.runs], 1.0)
        results.write()
        rest = complete(stalebench.run.Results(results.path), CELL, make_row)
        assert [chunk.keys for chunk in rest] == [chunk.keys for chunk in every[stop:]]


def test_runs_on_other_data_are_not_mixed(stalebench: Any, tmp_path: Path) -> None:
    results = stalebench.run.Results(tmp_path / "results.json")
    results.check("digits", {"digest": "a"})
    results.check("digits", {"digest": "b"})  # there are no runs yet
    results.runs["digits sgd 8 sync 0.1"] = {"0": [1.0]}
    results.check("digits", {"digest": "b"})
    with pytest.raises(SystemExit, match="other data"):
        results.check("digits", {"digest": "a"})


def test_processes_share_the_work(stalebench: Any, tmp_path: Path) -> None:
    results = stalebench.run.Results(tmp_path / "results.json")
    results.figures["tasks"]["digits"] = {"rates": {"sgd": 0.02}}
    first = stalebench.run.find_work(results, [CELL], ())
    second = stalebench.run.find_work(results, [CELL], first.keys)
    assert not first.keys & second.keys and not second.final


def test_the_plan_is_within_its_budget() -> None:
    steps = {"digits": 240, "clicks": 600, "images": 160, "source": 240}
    hours = [design.estimate(cell, steps[cell.task], {}) / 3600 for cell in design.CELLS]
    assert sum(hours) <= 12 and len(set(design.CELLS)) == len(design.CELLS)


# -- statistics -----------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    assert intervals.find_t_quantile(7) == pytest.approx(2.364624, abs=1e-5)
    assert intervals.find_t_quantile(1) == pytest.approx(12.7062, abs=1e-3)
    assert 1 - intervals.get_central_t(2.364624, 7) == pytest.approx(0.05, abs=1e-6)
    found = intervals.compare([1.0, 2.0, 3.0, 4.0], [0.0, 0.5, 2.5, 2.0])
    half = 3.182446 * math.sqrt(sum((d - 1.25) ** 2 for d in (1, 1.5, 0.5, 2)) / 3 / 4)
    assert (found.mean, found.high - found.mean) == pytest.approx((1.25, half), abs=1e-5)
    assert intervals.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


def test_verdicts() -> None:
    difference = intervals.Difference(0.02, 0.01, 0.03, 0.001)
    assert intervals.judge(difference, 0.01, 0.005) == "worse"
    assert intervals.judge(difference, 0.01, 0.05) == "not worse"
    assert intervals.judge(difference, 0.2, 0.005) == "unclear"
    assert intervals.judge(replace_mean(difference), 0.01, 0.005) == "better"


def replace_mean(difference: intervals.Difference) -> intervals.Difference:
    return difference._replace(mean=-difference.mean, low=-difference.high, high=-difference.low)


def test_a_curve_reaches_a_target() -> None:
    assert intervals.reach([4.0, 3.0, 2.0, 1.0], 2.5) == pytest.approx(0.5)
    assert intervals.reach([4.0, 3.0], 2.5) is None
    assert intervals.reach([None, 2.0], 2.5) == pytest.approx(0.75)


# -- the page -------------------------------------------------------------------------------------


def test_a_cell_is_judged(stalebench: Any, tmp_path: Path) -> None:
    results = stalebench.run.Results(tmp_path / "results.json")
    complete(results, CELL, make_row)
    task = {
        "rates": dict.fromkeys(optimizers.OPTIMIZERS, 0.02),
        "chance": 2.3,
        "score": "accuracy",
        "steps": 40,
    }
    figures = {"tasks": {"digits": task}, "runs": results.runs, "simulated": {"8": [1.875, 1.2, 1]}}
    (table,) = stalebench.summary.list_tables(figures)
    stash, sync = table.get("stash"), table.get("sync")
    assert table.complete and stash.verdict == "worse" and stash.rate == pytest.approx(0.02)
    assert stash.difference.mean == pytest.approx(0.2, abs=1e-3) and sync.verdict == ""
    assert table.get("spectrain").verdict == "not worse"
    text = stalebench.page.tabulate(table, figures, {})
    assert "stash (PipeDream) | 7 to 0 | 0.02 | 0.7" in text
    assert "above it in so many cells: stash (PipeDream) (1 of 1), naive (1 of 1)." in (
        claims.claim([table])
    )
    assert "half: stash (PipeDream), naive" in claims.claim_briefly([table])
    assert "| stash (PipeDream) | **worse** +8.7 |" in stalebench.page.summarize(figures, [table])
    drawn = stalebench.page.draw(figures, [table])
    assert all(text.startswith("<svg") and text.endswith("</svg>\n") for text in drawn.values())
    key = design.name_runs(CELL, "stash", stash.rate)
    results.runs[key]["3"] = [None, None, None, [None] * 20]  # it diverged
    (table,) = stalebench.summary.list_tables(figures)
    stash = table.get("stash")
    assert stash.diverged == 1 and stash.losses[3] == 2.3 and None in stash.updates
    del results.runs[key]["3"]
    (table,) = stalebench.summary.list_tables(figures)
    assert not table.complete and len(table.seeds) == 7
    assert "No cell" in claims.claim([table])


def test_the_pages_are_the_results(stalebench: Any) -> None:
    blocks = stalebench.page.contents()
    found: set[str] = set()
    for page in (stalebench.page.PAGE, *stalebench.page.QUOTING):
        for name, text in stalebench.readme.blocks(page.read_text("utf-8")).items():
            if name in blocks:
                assert text.strip() == blocks[name].strip(), name
                found.add(name)
    assert found == set(blocks)
    figures = stalebench.record.read("stalebench")["figures"]
    drawn = stalebench.page.draw(figures, list(stalebench.summary.list_tables(figures)))
    folder = stalebench.page.PICTURES
    assert {path.name: path.read_text("utf-8") for path in folder.glob("*.svg")} == drawn
    assert (FOLDER / "results" / "stalebench.json").stat().st_size < 2_000_000


# -- the tasks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_source_text_is_split_by_files() -> None:
    from benchmarks.stalebench.tasks import TASKS

    source = TASKS["source"]
    inputs, targets = source.draw(3)()
    again, _ = source.draw(3)()
    assert inputs.equal(again) and inputs[:, 1:].equal(targets[:, :-1])
    assert not inputs.equal(source.draw(4)()[0])
    sizes = [math.prod(shape) for layer in source.layers() for shape, _ in layer.shapes]
    assert sum(sizes) > 2_000_000
    assert len(source.splits()["train"][0]) > 1_000_000
