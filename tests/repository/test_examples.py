"""The examples run, and what they say of themselves holds."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from notebooks import FOLDER, list_examples, make_notebook
from ranks import torchrun

from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import depths

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@cache
def load(name: str) -> ModuleType:
    """An example as a module that compiles once; skipped where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("the example needs transformers")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.program = cache(module.program)  # type: ignore[attr-defined]
    return module


def plain(example: ModuleType, steps: int) -> list[float]:
    """The losses of an ordinary loop on the same model and batches."""
    model = example.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in example.batches(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_all_axes_trains_like_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks in this process: two stages, batch and tensors cut, sequence between them."""
    example = load("all_axes")
    assert example.main(3) == pytest.approx(plain(example, 3), rel=1e-5)
    assert "step  2" in capsys.readouterr().out


@pytest.mark.slow
def test_all_axes_is_what_it_says() -> None:
    program = load("all_axes").program(8)
    plan = program.plan
    assert [len(stage.ranks) for stage in plan.stages] == [4, 4]
    assert {(s.data_parallel, s.tensor_parallel) for s in plan.stages} == {(2, 2)}
    calls = re.findall(
        r'collectives\.(\w+)\(self\.mesh, \w+, "tp", (\d)', "\n".join(program.sources)
    )
    assert len(calls) == 2 * 9  # one of each at the embedding, attention and MLP of each layer
    along = {(name, dim) for name, dim in calls if name in ("all_gather", "reduce_scatter")}
    assert along == {("all_gather", "1"), ("reduce_scatter", "1")}  # along the sequence
    reductions = sum(source.count("all_reduce(self.mesh") for source in program.sources)
    assert reductions <= 2  # of the head's input and the loss, none in a layer


@pytest.mark.slow
def test_all_axes_under_torchrun() -> None:
    """Four real processes: one stage of data, tensor and sequence parallelism."""
    done = torchrun(EXAMPLES / "all_axes.py", ranks=4, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses == pytest.approx(plain(load("all_axes"), 10), abs=2e-4)


@pytest.mark.slow
def test_two_towers_train_like_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("two_towers")
    model = example.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = []
    for text, image, same in example.batches(3):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(text, image), same)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert example.main(3) == pytest.approx(wanted, rel=1e-4)
    assert "feeds stage" in capsys.readouterr().out


@pytest.mark.slow
def test_two_towers_are_what_they_say() -> None:
    """Two stages read nothing but the batch, and no microbatch passes all four stages."""
    plan = load("two_towers").program().plan
    edges = plan.stage_edges
    assert len({*range(4)} - {target for _, target, _ in edges}) == 2
    assert depths(4, [StageEdge(*edge) for edge in edges])[0] < 4


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_tells_of_the_run(
    installed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It learns; rank 0 writes lines of JSON, and TensorBoard's file where that is installed."""
    spec = importlib.util.spec_from_file_location("example_logged_run", EXAMPLES / "logged_run.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    written: list[tuple[str, int]] = []
    fake = ModuleType("torch.utils.tensorboard")

    class SummaryWriter:
        """Takes what TensorBoard's takes."""

        def __init__(self, log_dir: str) -> None:
            assert log_dir == str(tmp_path)

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            assert math.isfinite(value)
            written.append((tag, step))

        def close(self) -> None:
            written.append(("closed", 0))

    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake if installed else None)
    found = example.main(str(tmp_path), steps=60)
    assert found["accuracy"] > 0.5
    told = capsys.readouterr()
    assert "60 steps (steps)" in told.out
    assert (example.MISSING in told.err) == (not installed)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    assert events == ["start", "evaluation", "evaluation", "epoch", "evaluation", "end"]
    if installed:
        assert written[-1] == ("closed", 0)
        assert {("train/loss", 60), ("evaluation/accuracy", 60)} <= set(written)


def load_plain(name: str) -> ModuleType:
    """The example as a module; it needs nothing that is optional."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recommender() -> ModuleType:
    return load_plain("recommender")


@pytest.mark.slow
def test_the_recommender_learns_as_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """From chance to a ranking, the same as of a loop without fxpart; and both say so."""
    example, rows = recommender(), 24 * 256
    found = example.main(rows)
    assert abs(found["auc_before"] - 0.5) < 0.05 and found["auc"] > 0.6
    assert "AUC " in capsys.readouterr().out
    with tempfile.TemporaryDirectory() as folder:
        train = example.write_logs(Path(folder) / "train.npy", rows)
        new = example.write_logs(Path(folder) / "new.npy", 16 * 256, seed=1)
        model = example.model()
        optimizer = example.adagrad(model.parameters())
        for numbers, ids, clicks in example.batches(train):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), clicks)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        auc = example.Auc()
        with torch.no_grad():
            for numbers, ids, clicks in example.batches(new):
                auc.update(model(numbers, ids), (clicks,))
    assert found["auc"] == pytest.approx(auc.compute(), abs=1e-3)


@pytest.mark.slow
def test_the_recommender_learns_asynchronously() -> None:
    found = recommender().main(24 * 256, "spectrain")
    assert abs(found["auc_before"] - 0.5) < 0.05 and found["auc"] > 0.6


@pytest.mark.slow
def test_the_asynchronous_example_emulates_what_the_ranks_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example, steps = load_plain("asynchronous"), 24
    emulated = example.emulate(steps)
    assert example.train(steps) == pytest.approx(list(emulated["spectrain"]), rel=1e-5)
    assert emulated["stash"] != emulated["sync"]
    said = capsys.readouterr().out
    assert "staleness (3, 2, 1, 0)" in said and "schedule         async" in said


def test_notebooks_are_the_examples_with_cells() -> None:
    """Written by tests/support/notebooks.py; two at least."""
    wanted = {path.stem: make_notebook(path.read_text("utf-8")) for path in list_examples()}
    assert {"unet", "asynchronous"} <= set(wanted)
    assert {p.stem: p.read_text("utf-8") for p in FOLDER.glob("*.ipynb")} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in list_examples()])
def test_notebooks_run(name: str) -> None:
    """In a kernel, all cells from the first to the last, with few steps."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    text = re.sub(r"\((80|200)\)", "(4)", (FOLDER / f"{name}.ipynb").read_text("utf-8"))
    assert "(4)" in text
    found = nbformat.reads(text, as_version=4)
    nbformat.validate(found)
    client.NotebookClient(found, timeout=120).execute()
    printed = "".join(
        each.get("text", "") for cell in found.cells for each in cell.get("outputs", ())
    )
    assert re.search(r"loss \d\.\d+", printed) and "stages x 1 rank" in printed


def test_auc_by_hand() -> None:
    """Clicks 0.9, 0.4; none 0.4, 0.1: of four pairs three are right and one is even."""
    auc = recommender().Auc()
    auc.update(torch.tensor([0.9, 0.4]), (torch.tensor([1.0, 0.0]),))
    auc.update(torch.tensor([0.4, 0.1]), (torch.tensor([1.0, 0.0]),))
    assert auc.compute() == pytest.approx(3.5 / 4)
