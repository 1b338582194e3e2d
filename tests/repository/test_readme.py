"""README: its quickstart runs as written; tables, there and on pages, are what was measured."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import torchrun

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = "".join(
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("fxpart/docs/benchmarks.md", "tests/benchmarks/RESULTS.md")
)


def quickstart(sign: str) -> str:
    """The quickstart's diff with the lines that ``sign`` marks, and without the others."""
    (block,) = re.findall(r"(?ms)^```diff\n(.*?)^```", README)
    return "".join(line[1:] for line in block.splitlines(True) if line[0] in (" ", sign))


def run(text: str) -> list[float]:
    """The losses of a script, seen at the end of each pass of its loop."""
    losses: list[float] = []
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("    ") and line.strip())
    lines.insert(last + 1, "    losses.append(loss.item())")
    exec("\n".join(lines), {"__name__": "__main__", "losses": losses})
    return losses


@pytest.fixture
def benchmark() -> Any:
    """A function that loads a script of tests/benchmarks by name."""
    folder = str(ROOT / "tests" / "benchmarks")
    path, known = list(sys.path), set(sys.modules)

    def load(name: str) -> ModuleType:
        sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path[:] = path
    for name in {n for n in set(sys.modules) - known if n.startswith(("record", "readme"))}:
        del sys.modules[name]


def test_the_quickstart_is_short() -> None:
    (block,) = re.findall(r"(?ms)^```diff\n(.*?)^```", README)
    assert sum(line[0] in "+-" for line in block.splitlines()) <= 10


@pytest.mark.slow
def test_the_quickstart_gives_the_losses_of_the_loop_it_changes() -> None:
    before, after = run(quickstart("-")), run(quickstart("+"))
    assert len(before) == len(after) == 10
    assert after == pytest.approx(before, rel=1e-4)
    assert len(set(after)) == 10


@pytest.mark.slow
def test_the_quickstart_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        quickstart("+") + "\nprint(f'\\nrank {trainer.rank} loss {loss.item():.4f}\\n', end='')\n"
    )
    done = torchrun(script, ranks=2, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"rank (\d) loss ([\d.]+)", done.stdout))
    assert losses.keys() == {"0", "1"} and losses["0"] == losses["1"]
    assert float(losses["0"]) == pytest.approx(run(quickstart("-"))[-1], rel=1e-3)


@pytest.mark.slow
def test_all_axes_in_one_plan_give_the_losses_of_the_loop() -> None:
    """The block on meshes, in place of the quickstart's compile()."""
    (block,) = re.findall(r"(?ms)^```python\n(fxpart\.annotate.*?)^```", README)
    lines = quickstart("+").splitlines(True)
    text = "".join(block if line.startswith("program = ") else line for line in lines)
    assert "dp=2,tp=2" in text
    assert run(text) == pytest.approx(run(quickstart("-")), rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "zoo", "figures", "planner", "others", "maxload", "accuracy", "communication",
        "pipelining", "asynchronous", "failures", "summary", "quotas", "clusters", "queued",
        "gloo_threads", "slow_links", "memory", "memory_layouts",
    ],
)  # fmt: skip
def test_tables_are_the_results(name: str, benchmark: Any) -> None:
    readme = benchmark("readme")
    written = readme.blocks(README + MEASURED)[name]
    assert written.strip() == readme.TABLES[name]().strip()
    assert written.count("\n|") > 5


def test_failures_have_a_row_for_each_result(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = benchmark("record"), benchmark("readme_failures")
    reader = {"files": 1000, "slowest_seconds": 0.1, "process_peak_bytes": 40_000_000}
    larger = {"files": 200, "slowest_seconds": 0.25, "process_peak_bytes": 280_000_000}
    figures = {
        "fuzz": {"readers": {"plan": reader, "ring": larger}, "failed": []},
        "saving_killed": {"newest_loaded": 100, "kills": 100, "killed_within_a_save": 60},
    }
    for module in (page, sys.modules["record"], record):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert page.failures().count("\n|") == 1  # the heading alone
    options = argparse.Namespace(date="2026-01-01", dry=False)
    for made, (name, found) in enumerate(figures.items(), 2):
        sys.modules["record"].write(name, found, options)
        assert page.failures().count("\n|") == made
    assert "1,200 files; readers that failed: none; the slowest file 0.25 s" in page.failures()
    assert "2 readers" in page.failures() and "280 MB" in page.failures()
    assert "the newest checkpoint is complete 100 of 100 times" in page.failures()


def test_the_table_of_selected_plans_is_the_result(benchmark: Any) -> None:
    """One row for each model and number of ranks that was measured."""
    readme = benchmark("readme")
    written = readme.blocks(MEASURED)["choice"]
    assert written.strip() == readme.TABLES["choice"]().strip()
    rows = benchmark("record").read("choice")["figures"]
    assert rows and written.count("\n|") == 1 + len(rows)


def test_the_table_of_profiling_is_the_result(benchmark: Any) -> None:
    readme = benchmark("readme")
    written = readme.blocks(MEASURED)["profiling"]
    assert written.strip() == readme.TABLES["profiling"]().strip()
    assert written.count("\n|") == 3 and "FXP406" in written


def test_every_model_of_the_zoo_is_in_the_table(benchmark: Any) -> None:
    from zoo import ZOO

    table = benchmark("readme").blocks(MEASURED)["zoo"]
    assert set(re.findall(r"(?m)^\| `(\w+)`", table)) == set(ZOO)
