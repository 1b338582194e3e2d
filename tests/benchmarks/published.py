"""Predicted against published step time and peak memory of training runs on GPUs.

    python tests/benchmarks/published.py                       (the files of ../shared/bench/gpu)
    python tests/benchmarks/published.py --runs FILE ... --json
    python tests/benchmarks/published.py --leave-one-out       (fits without each source; minutes)
    python tests/benchmarks/published.py --microbatches        (chosen beside printed ones)

Each run's operators are priced by fxpart's cost model from data sheets and the efficiencies of the
device's architecture, and composed by the run's layout: nothing is fitted per run. Files of layer
profiles (format of sailor.json) are composed from the profiles. Without a file it says so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import Any

from record import ROOT

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import published_fit as fits  # noqa: E402
import published_profiles as profiles  # noqa: E402
from published_clusters import find_run, reason_to_skip  # noqa: E402
from published_facts import REPEATED  # noqa: E402
from published_memory import predict_bytes  # noqa: E402
from published_step import model_flops, predict_seconds  # noqa: E402

DRAWS = 200  # of repeated measurements
DEFAULT = ROOT.parent / "shared" / "bench" / "gpu"


def default_files() -> list[Path]:
    """Return the files beside the checkout or its main worktree."""
    folders = [base / "shared" / "bench" / "gpu" for base in ROOT.parents]
    folder = next((f for f in folders if f.is_dir()), DEFAULT)
    return [folder / name for name in ("published_runs.json", "sailor.json")]


def default_profiles() -> dict[str, Any]:
    """Return the profiles of layers and networks for files that have runs only."""
    path = default_files()[-1]
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def predict_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the predictions of the rows that can be expressed, and the others with the reason."""
    found, skipped = [], []
    for row in rows:
        run = find_run(row)
        if isinstance(run, str):
            name = row.get("id") if isinstance(row, dict) else None
            skipped.append(f"{name}: {run}")
            continue
        seconds, memory = predict_seconds(run), predict_bytes(run)
        published = run.row["measured"]["step_seconds"]
        printed = run.row["measured"].get("peak_memory_bytes")
        found.append(
            {
                "id": run.row["id"],
                "source": run.row["source"],
                "use": run.row.get("use", "absolute"),
                "gpu": run.row["gpu"],
                "gpus": run.row["gpus"],
                "seconds": seconds,
                "ratio": seconds / published,
                "published": published,
                "mfu": model_flops(run) / seconds / run.row["gpus"] / run.peak,
                "bytes": memory,
                "memory_ratio": memory / printed if printed else None,
                "refused": memory > run.device.memory,
            }
        )
    return found, skipped


def predict_profiles(data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return predictions from the profiles of layers, and the runs without one with the reason."""
    found, skipped = [], []
    for run in data["runs"]:
        if why := profiles.reason_to_skip(run, data):
            skipped.append(f"{run.get('id')}: {why}")
        else:
            ratio = profiles.predict(run, data) / run["measured_seconds"]
            found.append({"id": run["id"], "ratio": ratio})
    return found, skipped


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 100) // 100) - 1)]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, with equal ranks for equal values."""
    ranks = []
    for values in (a, b):
        ordered = sorted(values)
        ranks.append([ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values])
    means = [sum(r) / len(r) for r in ranks]
    x, y = ([v - m for v in r] for r, m in zip(ranks, means, strict=True))
    size = (sum(v * v for v in x) * sum(v * v for v in y)) ** 0.5
    return sum(p * q for p, q in zip(x, y, strict=True)) / size if size else 1.0


def summarize(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the line that --json prints."""
    absolute = [row for row in found if row["use"] == "absolute"]
    errors = [abs(row["ratio"] - 1) for row in absolute]
    signed: dict[str, list[float]] = defaultdict(list)
    for row in absolute:
        signed[row["source"]].append(row["ratio"] - 1)
    by_source = {source: median(values) for source, values in signed.items()}
    worst = max(by_source, key=lambda source: abs(by_source[source]), default="")
    memory = [abs(r["memory_ratio"] - 1) for r in absolute if r["memory_ratio"] is not None]
    return {
        "runs": len(absolute),
        "median_error": round(median(errors), 4) if errors else None,
        "p90_error": round(quantile(errors, 0.9), 4) if errors else None,
        "worst_source": round(by_source[worst], 4) if worst else None,
        "worst_source_name": worst,
        "refused": sum(row["refused"] for row in absolute),
        "memory_median_error": round(median(memory), 4) if memory else None,
    }


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the sources, in Markdown."""
    lines = [
        "| source | runs | predicted / published, median | least | most | rank correlation | "
        "memory, median | refused |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for source in dict.fromkeys(row["source"] for row in found):
        rows = [row for row in found if row["source"] == source and row["use"] == "absolute"]
        if not rows:
            continue
        ratios = [row["ratio"] for row in rows]
        memory = [row["memory_ratio"] for row in rows if row["memory_ratio"] is not None]
        rank = rank_correlation(
            [row["seconds"] for row in rows], [row["published"] for row in rows]
        )
        lines.append(
            f"| {source} | {len(rows)} | {median(ratios):.2f} | {min(ratios):.2f} | "
            f"{max(ratios):.2f} | {f'{rank:.3f}' if len(rows) > 2 else ''} | "
            f"{f'{median(memory):.2f}' if memory else ''} | {sum(r['refused'] for r in rows)} |"
        )
    return lines


def repeated_rank(rows: Sequence[dict[str, Any]], source: str) -> float:
    """Return the rank correlation to expect between two measurements of a source's runs."""
    spreads = REPEATED[source]
    drawn = random.Random(0)
    times, deviations = [], []
    for row in rows:
        if row["source"] == source and row["use"] == "absolute":
            fits = [s for (gpu, least), s in spreads.items() if row["gpu"] == gpu
                    and row["gpus"] >= least]  # fmt: skip
            times.append(row["published"])
            deviations.append(max(fits, default=0.0))
    found = []
    for _ in range(DRAWS):
        again = [t * exp(drawn.gauss(0, d)) for t, d in zip(times, deviations, strict=True)]
        found.append(rank_correlation(times, again))
    return fmean(found)


def left_out_lines(rows: Sequence[dict[str, Any]], as_json: bool) -> list[str]:
    """Return a table of the fits that leave out one source, or one line of JSON."""
    usable = [row for row in rows if row["use"] == "absolute" and not reason_to_skip(row)]
    found = fits.leave_one_out(usable)
    if as_json:
        return [json.dumps(found)]
    lines = [
        "| left out of the fit | median of \\|ratio - 1\\|, all runs | its own median error |",
        "| --- | ---: | ---: |",
    ]
    for one in found:
        own = "" if one["own_median"] is None else f"{one['own_median']:+.2f}"
        lines.append(f"| {one['left_out'] or 'none'} | {one['median_error']:.3f} | {own} |")
    return [*lines, json.dumps(found[0]["values"])]


def microbatch_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how the microbatches that would be chosen compare with those that rows print."""
    same, changes = 0, []
    for row in rows:
        printed = find_run(row)
        if isinstance(printed, str) or not row.get("microbatch") or row.get("use") != "absolute":
            continue
        chosen = find_run(row | {"microbatch": None, "microbatches": None})
        if isinstance(chosen, str):
            continue
        same += chosen.row["microbatch"] == printed.row["microbatch"]
        changes.append(abs(predict_seconds(chosen) / predict_seconds(printed) - 1))
    return [
        f"{same} of {len(changes)} printed microbatches are chosen; predicted step times differ by "
        f"{median(changes):.1%} in the median, 90 % of them by at most {quantile(changes, 0.9):.1%}"
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=Path, help="files of published runs or profiles")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--rows", action="store_true", help="print every run")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="fit the efficiencies without each source"
    )
    parser.add_argument(
        "--microbatches", action="store_true", help="compare chosen microbatches with printed ones"
    )
    options = parser.parse_args(arguments)
    files = options.runs or default_files()
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        sys.stdout.write(f"There is no file {', '.join(missing)}. Name files with --runs.\n")
        return 0
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    rows = [row for document in documents for row in document.get("rows", ())]
    if options.leave_one_out:
        sys.stdout.write("\n".join(left_out_lines(rows, options.json)) + "\n")
        return 0
    if options.microbatches:
        sys.stdout.write("\n".join(microbatch_lines(rows)) + "\n")
        return 0
    found, skipped = predict_rows(rows)
    profiled: list[dict[str, Any]] = []
    for document in documents:
        if "runs" in document:
            more, without = predict_profiles(default_profiles() | document)
            profiled, skipped = profiled + more, skipped + without
    figures = summarize(found)
    if profiled:
        errors = [abs(row["ratio"] - 1) for row in profiled]
        figures |= {
            "profiled_runs": len(errors),
            "profiled_median_error": round(median(errors), 4),
            "profiled_worst_error": round(max(errors), 4),
        }
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return 0
    lines = table(found)
    lines += [
        f"{source}: rank correlation {repeated_rank(found, source):.2f} of two measurements"
        for source in REPEATED
        if any(row["source"] == source for row in found)
    ]
    if options.rows:
        lines += [
            f"{row['id']}: {row['seconds']:.4g} s, {row['ratio']:.2f} of published, MFU "
            f"{row['mfu']:.0%}, {row['bytes'] / 1e9:.0f} GB"
            for row in found
        ]
        lines += [f"{row['id']}: {row['ratio']:.2f} of measured" for row in profiled]
    reasons = Counter(text.partition(": ")[2] for text in skipped)
    lines += [f"not predicted, {count}: {why}" for why, count in reasons.most_common()]
    sys.stdout.write("\n".join([*lines, json.dumps(figures)]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
