"""The table of published runs: how it counts, and its figures where the files are there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import published

    return published


def row(source: str, ratio: float, use: str = "absolute") -> dict[str, object]:
    return {
        "source": source, "use": use, "ratio": ratio, "memory_ratio": None, "refused": False,
        "seconds": ratio, "published": 1.0,
    }  # fmt: skip


def test_summary_counts_absolute_rows(published) -> None:  # type: ignore[no-untyped-def]
    rows = [row("a", 1.1), row("a", 1.2), row("b", 0.7), row("b", 9.0, "ratios")]
    assert published.summarize(rows) == {
        "runs": 3, "median_error": 0.2, "p90_error": 0.3, "refused": 0,
        "worst_source": -0.3, "worst_source_name": "b", "memory_median_error": None,
    }  # fmt: skip


def test_rank_correlation(published) -> None:  # type: ignore[no-untyped-def]
    assert published.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert published.rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert published.rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)


def test_absent_files_are_reported(published, capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert published.main(["--runs", str(tmp_path / "none.json")]) == 0
    assert "There is no file" in capsys.readouterr().out


def test_figures_of_the_published_runs(published, capsys) -> None:  # type: ignore[no-untyped-def]
    files = published.default_files()
    if not all(path.is_file() for path in files):
        pytest.skip("the files of published runs (../shared/bench/gpu) are not there")
    import published_facts

    assert published.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] + len(published_facts.BEYOND) >= 254 and found["refused"] == 0
    assert found["median_error"] <= 0.10 and found["p90_error"] <= 0.25
    assert abs(found["worst_source"]) <= 0.15
    assert found["memory_median_error"] <= 0.10
    assert found["profiled_median_error"] <= 0.07


def run(source: str, layers: int, **fields: object) -> dict[str, object]:
    """A row of the file: a GPT on one A100."""
    return {
        "id": f"{source}/{layers}", "source": source, "use": "absolute", "gpu": "A100-SXM4-80GB",
        "gpus": 1, "gpus_per_host": 1, "sequence": 1024, "microbatch": 4, "microbatches": 1,
        "global_batch": 4, "precision": {"compute": "bf16", "printed": "bf16 autocast"},
        "model": {"kind": "gpt", "layers": layers, "hidden": 1024, "heads": 16, "ffn": 4096,
                  "vocab": 50257},
        "layout": {"dp": 1, "zero": 0, "tp": 1, "cp": 1, "pp": 1},
        "measured": {"step_seconds": 1.0}, **fields,
    }  # fmt: skip


def test_a_file_of_runs(published, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"rows": [run("a", 4), run("b", 8), run("c", 8, gpu="none")]}))
    assert published.main(["--runs", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 2 and found["refused"] == 0


def test_compilation_fuses_what_is_elementwise(published) -> None:  # type: ignore[no-untyped-def]
    """Attention in three ops: its conversions, scale and mask are kernels only in eager mode."""
    rows = [run("a", 4, attention="math", compile=given) for given in (False, True)]
    eager, compiled = published.predict_rows(rows)[0]
    assert compiled["seconds"] < 0.8 * eager["seconds"]


def test_the_history_of_a_source_corrects_its_rows(published) -> None:  # type: ignore[no-untyped-def]
    import published_facts

    found = published_facts.correct(run("nanogpt", 4, attention="flash"))
    assert found["attention"].startswith("math") and found["model"]["vocab"] == 50257
    assert found["model"]["layers"] == 4
    assert published_facts.correct(run("a", 4)) == run("a", 4)


@pytest.mark.slow
def test_a_fit_finds_the_efficiency_that_made_the_times(published) -> None:  # type: ignore[no-untyped-def]
    """Times of two sources, computed with another efficiency; the third is half as fast."""
    import published_fit
    from published_clusters import describe

    rows = [run(source, layers) for source in "ab" for layers in (4, 8)]
    made = published_fit.predict(map(describe, rows), {"ampere": {"matmul": 0.6}})
    for row, seconds in zip(rows, made, strict=True):
        row["measured"] = {"step_seconds": seconds}
    rows.append(run("c", 4, measured={"step_seconds": 2 * made[0]}))
    found = {one["left_out"]: one for one in published_fit.leave_one_out(rows)}
    assert found["c"]["median_error"] < 0.02 and found["c"]["own_median"] == pytest.approx(
        -0.5, abs=0.02
    )
    assert found["c"]["values"]["ampere"]["matmul"] == pytest.approx(0.6, abs=0.03)
