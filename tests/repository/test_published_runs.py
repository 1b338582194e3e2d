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
    assert published.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] >= 254
    assert found["median_error"] <= 0.10 and found["p90_error"] <= 0.25
    assert found["memory_median_error"] <= 0.10
    assert found["profiled_median_error"] <= 0.07
