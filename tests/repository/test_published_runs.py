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

    assert published.main([]) == 0
    text = capsys.readouterr().out
    assert "rank correlation 0.96 of two measurements" in text
    found = json.loads(text.splitlines()[-1])
    assert found["runs"] + len(published_facts.BEYOND) >= 272 and found["refused"] == 0
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


MIXTURE = {
    "kind": "moe", "layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 4, "vocab": 32000,
    "experts": 16, "experts_active": 2, "expert_ffn": 1024,
}  # fmt: skip


def on_hosts(model: dict[str, object], **layout: object) -> dict[str, object]:
    """A row of a model in bfloat16 on four hosts of 8 A100."""
    fields = {"gpus": 32, "gpus_per_host": 8, "global_batch": 128, "attention": "flash"}
    layout = {"dp": 32, "tp": 1, "pp": 1, "zero": 1} | layout
    return run("moe", 8, **fields, microbatches=1, model=model, layout=layout)


def test_mixtures_of_experts(published) -> None:  # type: ignore[no-untyped-def]
    """More experts are more to store and to send, and no more to compute for each token."""

    def predict(model: dict[str, object], **layout: object) -> tuple[float, float]:
        found, why = published.predict_rows([on_hosts(model, **layout)])
        assert not why
        return found[0]["seconds"], found[0]["bytes"]

    alone = predict(MIXTURE, ep=1)
    near, far = predict(MIXTURE, ep=8), predict(MIXTURE, ep=16)
    assert far[1] < near[1] < alone[1]  # each rank has a part of the experts
    assert near[0] < far[0]  # rows leave the host
    assert predict(MIXTURE | {"experts_active": 4}, ep=8)[0] > near[0]
    assert predict(MIXTURE | {"shared_experts": 1}, ep=8)[0] > near[0]
    assert predict(MIXTURE | {"capacity": 1.5}, ep=8)[0] > near[0]
    assert predict(MIXTURE | {"dense_layers": 7, "dense_ffn": 1024}, ep=8)[0] < near[0]


def test_the_width_of_experts_follows_from_parameters() -> None:
    """Of two models that name their sizes, without these and with a name that nobody knows."""
    import published_models as models

    for name, fields in (
        ("gpt-oss-120b", {"layers": 36, "hidden": 2880, "experts": 128, "experts_active": 4,
                          "params": 117e9, "params_active": 5.1e9}),
        ("Qwen3-235B-A22B", {"layers": 94, "hidden": 4096, "experts": 128, "experts_active": 8,
                             "params": 235e9, "params_active": 22e9}),
    ):  # fmt: skip
        known, derived = (
            models.complete_model({"kind": "moe", "name": each} | fields) for each in (name, "?")
        )
        assert derived["expert_ffn"] == known["expert_ffn"]
        for model in (known, derived):
            blocks = models.dense_parameters(model) + models.expert_parameters(model)
            total = model["layers"] * blocks + 2 * model["vocab"] * model["hidden"]
            assert total == pytest.approx(fields["params"], rel=0.01)


def test_what_is_not_printed_is_chosen_by_memory(published) -> None:  # type: ignore[no-untyped-def]
    """The fastest microbatch that fits, and the least recomputation with which it does."""
    from published_clusters import describe

    large = run("a", 48)
    large["model"] |= {"hidden": 4096, "heads": 32, "ffn": 16384}  # type: ignore[operator]
    large |= {"gpus": 8, "gpus_per_host": 8, "global_batch": 256}
    large["layout"] = {"dp": 1, "tp": 8, "cp": 1, "pp": 1, "zero": 0}
    free = describe(large | {"microbatch": None, "microbatches": None})
    tried = [
        describe(large | {"microbatch": 2**n, "microbatches": 256 >> n, "recompute": "none"})
        for n in range(9)
    ]
    fits = [one for one in tried if published.predict_bytes(one) <= one.device.memory]
    assert 0 < len(fits) < len(tried)
    assert published.predict_bytes(free) <= free.device.memory
    assert published.predict_seconds(free) <= min(map(published.predict_seconds, fits))
    next_one = tried[len(fits)].row
    more = {key: next_one[key] for key in ("microbatch", "microbatches")}
    again = describe(large | more | {"recompute": None})
    assert again.recompute != "none" and published.predict_bytes(again) <= again.device.memory


def test_profiled_runs_without_profiles_say_why(published) -> None:  # type: ignore[no-untyped-def]
    """A model, a GPU or a network of which the file has no measurement."""
    place = {"gpu": "G", "tp": 1}
    stage = {"layers": 2, "dp": 1, "replicas": [place]}
    one = {"id": "a", "model": "M", "microbatch": 1, "global_batch": 2, "stages": [stage]}
    times = {"embedding": [1, 1, 0], "block_median": [1, 2, 0], "head": [3, 4, 0], "layers": 4}
    config = {"hidden_size": 8, "sequence_length": 8, "vocab_size": 8}
    data = {
        "models": {"M": config}, "network": {"all": {"inter": {}}},
        "layers": {"M": {"G": {"1": {"1": times}}}},
        "runs": [
            one | {"measured_seconds": 24.0, "stages": [stage | {"layers": 4}]},
            one, one | {"model": "N"}, {"id": "b"}, one | {"stages": [stage, stage]},
        ],
    }  # fmt: skip
    found, skipped = published.predict_profiles(data)
    assert found == [{"id": "a", "ratio": pytest.approx(1.25)}]  # 2 x (1 + 2 + 3 + 1 + 4 + 4) s
    assert [text.partition(": ")[2] for text in skipped] == [
        "its stages do not have the layers of the model", "no profile of N on 1 G",
        "the run cannot be read: KeyError", "no network of G",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "model"),
    [
        ("A100-SXM4-80GB", "a100-sxm-80gb"), ("RTXA6000-48GB", "a6000"), ("P40-24GB", "p40"),
        ("QuadroRTX8000-48GB", "quadro-rtx-8000"), ("RTX6000Ada-48GB", "rtx-6000-ada"),
        ("H100", "h100-sxm"), ("V100-32GB", "v100-sxm2-32gb"), ("RTX2080Ti-11GB", "rtx-2080-ti"),
        ("GB200 (one GPU)", "gb200"), ("MI250X (one die)", "mi250x"), ("Gaudi2", None),
    ],
)  # fmt: skip
def test_printed_devices(published, printed: str, model: str | None) -> None:  # type: ignore[no-untyped-def]
    from published_clusters import find_device

    assert find_device(printed) == model


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("8 HDR InfiniBand adapters of 200 Gbit/s a host", 25e9),
        ("400 Gbit/s RDMA for each GPU", 50e9),
        ("H100: not printed; A100: 1600 Gbit/s a host, RoCE", 25e9),
        ("NVLink 600 GB/s; 4x100Gb/s per node", 6.25e9),
        ("25 GB/s per node", 3.125e9),
        ("4x Slingshot 200 Gbit/s a host", 12.5e9),
        ("4 Omni-Path links a host", None),
        (None, None),
    ],
)
def test_printed_networks(published, text: str | None, each: float | None) -> None:  # type: ignore[no-untyped-def]
    from published_clusters import network_bandwidth

    row = {"gpu": "A100-SXM4-80GB", "gpus_per_host": 8, "interconnect": text}
    assert network_bandwidth(row) == each


@pytest.mark.slow
def test_rows_with_anything_in_them_are_predicted_or_say_why(published) -> None:  # type: ignore[no-untyped-def]
    """Each field of a row in turn is absent or has a value without meaning."""
    values = [None, 0, -1, "", [], {}, "unknown", 1e30, True, 3.5, float("nan"), "fp8", 7]
    known = published.predict_rows([on_hosts(MIXTURE, ep=8)])[0][0]
    for base in (run("a", 4), on_hosts(MIXTURE, ep=8, schedule="1f1b")):
        groups = [(base, None)] + [(base[k], k) for k in base if isinstance(base[k], dict)]
        for group, name in groups:
            for key in group:  # type: ignore[attr-defined]
                for value in (*values, "absent"):
                    changed = {**group, key: value}  # type: ignore[dict-item]
                    if value == "absent":
                        del changed[key]
                    row = changed if name is None else {**base, name: changed}
                    found, why = published.predict_rows([row])
                    assert len(found) + len(why) == 1
                    assert all(0 < one["seconds"] < 1e9 and one["bytes"] > 0 for one in found)
    for row, reason in (
        ({}, "sequence is not printed"),
        ("text", "the row is no object"),
        (run("a", 4, gpu="TPU v4"), "no device data for TPU v4"),
        (run("a", 4, precision={"compute": "int3"}), "the precision 'int3' is not known"),
        (on_hosts(MIXTURE, dp=8, pp=4, schedule="sideways"), "fxpart has no schedule 'sideways'"),
        (on_hosts(MIXTURE, dp=8, pp=2), "the degrees do not multiply to the number of GPUs"),
        (on_hosts(MIXTURE | {"kind": "mamba", "experts": 1}), "no model of kind mamba"),
    ):  # fmt: skip
        assert reason in published.predict_rows([row])[1][0]
    assert known["seconds"] > 0


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
