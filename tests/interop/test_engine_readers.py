"""Configurations of other engines as constraints of the planner, and what would be faster."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from cli_calls import call
from engine_options import need
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpart
from fxpart.cli.options import CommandLineRequest
from fxpart.cli.plan_from import BY_BLOCKS, compare_with
from fxpart.errors import FxpartError
from fxpart.interop.engines import ENGINES, EngineRun, read_configuration
from fxpart.interop.engines.megatron import LayerDivision
from fxpart.interop.engines.torchtitan_reader import divide_by_weight

TOML = """
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_shard_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["norm"]]
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
MEGATRON = """#!/bin/bash
torchrun pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 \\
    --pipeline-model-parallel-layout "Ett|tL" \\
    --micro-batch-size 1 --global-batch-size 32 --bf16 \\
    --use-distributed-optimizer --recompute-activations  # in the middle
"""


def read(text: str, folder: Path) -> dict[str, object]:
    path = folder / "engine.toml"
    path.write_text(text)
    spec, run = read_configuration(str(path))
    found = run.resolve(8)
    return {"engine": spec.name, "batch": found.batch_size, "lost": found.lost,
            **found.constraints}  # fmt: skip


def test_toml_of_torchtitan(tmp_path: Path) -> None:
    found = read(TOML, tmp_path)
    assert found == {
        "engine": "torchtitan", "batch": 16, "tp": 2, "pp": 2, "dp": 2, "zero": 2,
        "schedule": "interleaved", "virtual": 2, "recompute": "full", "precision": "bf16",
        "microbatches": 4, "layout": "Et|t|t|L", "lost": (),
    }  # fmt: skip
    found = read(TOML.replace("Interleaved1F1B", "ZBVZeroBubble"), tmp_path)
    schedule, boundaries = found["lost"]  # type: ignore[misc]
    assert "schedule ZBVZeroBubble is not priced" in schedule and "boundaries" in boundaries
    assert "schedule" not in found and "virtual" not in found


def test_defaults_of_torchtitan_use_all_devices(tmp_path: Path) -> None:
    found = read("[training]\nlocal_batch_size = 4\nglobal_batch_size = 64\n", tmp_path)
    assert (found["dp"], found["zero"], found["microbatches"], found["batch"]) == (8, 3, 2, 64)
    assert found["recompute"] == "selective" and found["lost"] == ()


def test_hybrid_sharding(tmp_path: Path) -> None:
    """Of torchtitan it is priced where both degrees are given; of Megatron-LM it is listed."""
    text = "[training]\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
    found = read(text + "data_parallel_shard_degree = 4\n", tmp_path)
    assert (found["dp"], found["zero"], found["shard_degree"], found["lost"]) == (8, 3, 4, ())
    instances = MEGATRON.replace("--bf16", "--num-distributed-optimizer-instances 2")
    for one in (text, instances):
        found = read(one, tmp_path)
        assert "shard_degree" not in found and "Hybrid sharding" in str(found["lost"])


def test_script_of_megatron(tmp_path: Path) -> None:
    found = read(MEGATRON, tmp_path)
    assert found == {
        "engine": "megatron", "batch": 32, "lost": (), "tp": 2, "pp": 2, "dp": 2, "zero": 1,
        "recompute": "selective", "precision": "bf16", "layout": "Ett|tL", "schedule": "1f1b",
        "microbatches": 16,
    }  # fmt: skip


def test_context_parallelism(tmp_path: Path) -> None:
    """It takes devices from the data-parallel ranks; of Megatron-LM's kinds, one is priced."""
    found = read("[training]\n[parallelism]\ncontext_parallel_degree = 2\n", tmp_path)
    assert (found["cp"], found["dp"], found["lost"]) == (2, 4, ())
    text = "--micro-batch-size 1 --tensor-model-parallel-size 2 --context-parallel-size 2 "
    found = read(text, tmp_path)
    assert (found["cp"], found["tp"], found["dp"]) == (2, 2, 2)
    (sentence,) = found["lost"]  # type: ignore[misc]
    assert "gathered keys and values" in sentence
    assert read(text + "--cp-comm-type allgather", tmp_path)["lost"] == ()


def test_default_stages_of_the_engines() -> None:
    """By hand, as each engine counts; the planner's boundaries where it refuses."""
    division = partial(LayerDivision, pipeline=4)
    assert division().divide(8) == (2, 2, 2, 2) and division().divide(9) == ()
    assert division(virtual=2).divide(16) == (2,) * 8 == division(each=2).divide(16)
    assert division(first=1, last=3).divide(8) == (1, 2, 2, 3)
    assert division(first=4, virtual=2).divide(10) == (2, 1, 1, 1, 2, 1, 1, 1)
    assert division(embedding=True, loss=True, virtual=2).divide(14) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert division(first=9).divide(8) == () == division(virtual=3).divide(16)
    # 32 layers, the embedding and the head, on 4 ranks: 34 = 9 + 9 + 8 + 8.
    assert divide_by_weight(32, 4) == (8, 9, 8, 7)
    assert divide_by_weight(3, 2, 2, 2) == (2, 1) and divide_by_weight(2, 4, 2) == ()
    run = EngineRun({"tp": 1, "pp": 4}, divide=partial(divide_by_weight, stages=4))
    assert run.with_stages(6).constraints["layout"] == "Et|tt|tt|tL"
    assert "layout" not in run.with_stages(0).constraints
    assert "planner" in run.with_stages(0).lost[0]
    virtual = EngineRun(
        {"tp": 1, "pp": 2, "virtual": 2}, divide=LayerDivision(pipeline=2, virtual=2).divide
    )
    assert virtual.with_stages(8).constraints["layout"] == "Ett|tt|tt|ttL"
    assert len(virtual.with_stages(6).lost) == 1
    plain = EngineRun({"tp": 1, "pp": 1})
    assert plain.with_stages(6) == plain


def test_virtual_stages_of_megatron(tmp_path: Path) -> None:
    """From a layout with more stages than ranks, and from their number or size."""
    head = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --num-layers 8 "
    found = read(head + "--pipeline-model-parallel-layout 'Et|tt|tt|ttL'", tmp_path)
    assert (found["virtual"], found["schedule"]) == (2, "interleaved")
    assert found["layout"] == "Et|tt|tt|ttL" and not found["lost"]
    for option in ("--num-virtual-stages-per-pipeline-rank 2",
                   "--num-layers-per-virtual-pipeline-stage 2"):  # fmt: skip
        path = tmp_path / "run.sh"
        path.write_text(head + option)
        run = read_configuration(str(path))[1].resolve(2).with_stages(8)
        assert run.constraints["virtual"] == 2 and run.constraints["layout"] == "Ett|tt|tt|ttL"
        assert run.constraints["schedule"] == "interleaved" and not run.lost
    for layout in ("E|t|L", "E||tL", "Ett|x"):
        (sentence,) = read(head + f"--pipeline-model-parallel-layout '{layout}'", tmp_path)["lost"]  # type: ignore[misc]
        assert "boundaries in the layout" in sentence


def test_default_stages_are_torchtitans() -> None:
    name = "torchtitan.distributed.pipeline_parallel"
    generate = vars(need("torchtitan", name))["_generate_llm_fqn_per_model_part"]
    for layers in range(2, 40):
        for stages in range(2, 9):
            try:
                parts = generate(stages, layers, 1, 1)
            except ValueError:
                assert divide_by_weight(layers, stages) == ()
                continue
            counts = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
            assert divide_by_weight(layers, stages) == counts, (layers, stages)


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("[parallelism]\ntensor_parallel_degree = 0\n", "FXP407", "tensor_parallel_degree"),
        ("[parallelism]\ntensor_parallel_degree = 'two'\n", "FXP407", "integer"),
        ("[parallelism]\npipeline_parallel_schedule = 3\npipeline_parallel_degree = 2", "FXP407",
         "text"),
        ("[parallelism\n", "FXP407", "no option of"),
        ("[training]\n[training]\n", "FXP407", "not TOML"),
        ("--micro-batch-size 'open", "FXP407", "no list of arguments"),
        ("--micro-batch-size 1 --tensor-model-parallel-size 16", "FXP502", "needs 16 devices"),
        ("plain text", "FXP407", "torchtitan and megatron"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(text: str, code: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(FxpartError) as refused:
        read(text, tmp_path)
    assert refused.value.code == code and why in str(refused.value)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.text(max_size=200))
def test_readers_raise_their_own_error_for_any_text(text: str) -> None:
    heads = ("[parallelism]\n", "--tensor-model-parallel-size 1 ", "--parallelism.x 1\n")
    for spec in ENGINES.values():
        for head in heads if spec.read is not None else ():
            assert spec.read is not None
            try:
                spec.read(head + text, "given").resolve(8)
            except FxpartError as refused:
                assert refused.code in ("FXP407", "FXP502")


TARGET = """
import torch
from torch import nn
import fxpart

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def work():
    torch.manual_seed(0)
    batch = torch.randn(2048, 512), torch.randn(2048, 512)
    return fxpart.Workload(Layers(), batch, loss=nn.MSELoss())
"""


@pytest.mark.slow
def test_plan_from_prices_today_and_what_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages that recompute are slower than the best plan, of which they are a special case."""
    monkeypatch.chdir(tmp_path)
    Path("layers.py").write_text(TARGET)
    Path("run.sh").write_text(
        "--pipeline-model-parallel-size 2 --micro-batch-size 256 --global-batch-size 2048 "
        "--recompute-granularity full --pipeline-model-parallel-layout 'Et|tttttL'"
    )
    command = ("plan", "layers.py:work", "-c", "1x2xa100")
    out, _ = call(capsys, *command, "--from", "run.sh", "-o", "best.json", "--json")
    found = json.loads(out)
    assert found["engine"] == "megatron" and found["batch_size"] == 2048 and found["lost"] == []
    assert found["today"] > found["best"] and found["speedup"] == found["today"] / found["best"]
    assert any(change["path"].startswith("stages") for change in found["changes"])
    stored = json.loads(Path("best.json").read_text())
    assert stored["batch_size"] == 2048 and stored["precision"] == "fp32"
    # The same decisions without --from have the same step time.
    call(
        capsys, *command, "-b", "2048", "-o", "same.json", "--fix", "pp=2",
        "--fix", "dp=1", "--fix", "tp=1", "--fix", "zero=0", "--fix", "recompute=full", "--fix",
        "microbatches=8", "--fix", "schedule=1f1b", "--layout", "Et|tttttL",
    )  # fmt: skip
    same = json.loads(Path("same.json").read_text())["prediction"]
    assert same["simulated_seconds"] == found["today"]
    # So have the boundaries of virtual stages, which torchtitan divides by weight: 8 = 2 x 4.
    Path("engine.toml").write_text(
        "[training]\nlocal_batch_size = 2048\nmixed_precision_param = 'float32'\n"
        "[parallelism]\ndata_parallel_shard_degree = 1\npipeline_parallel_degree = 2\n"
        "pipeline_parallel_schedule = 'Interleaved1F1B'\npipeline_parallel_microbatch_size = 256\n"
        "[activation_checkpoint]\nmode = 'none'\n"
    )
    out, _ = call(capsys, *command, "--from", "engine.toml", "--json")
    virtual = json.loads(out)
    assert virtual["constraints"]["layout"] == "Et|tt|tt|tL"
    assert virtual["lost"] == [BY_BLOCKS]
    request = CommandLineRequest("layers.py:work", command[-1], None, None, None, "auto", (), None)
    today = compare_with(request, "engine.toml").today
    assert today is not None and today.prediction.expected_seconds == virtual["today"]
    assert [stage.pieces for stage in today.stages] == [((0, 0), (3, 4)), ((1, 2), (5, 5))]
    out, _ = call(capsys, *command, "--from", "run.sh")
    said = f"```console\n$ fxpart {' '.join(command)} --from run.sh\n{out}```\n"
    page = (Path(fxpart.__file__).parent / "docs/other_engines.md").read_text("utf-8")
    assert f"<!-- output: engine -->\n{said}<!-- /output -->" in page, said
