"""Plans as configurations of other engines: names, numbers, what is lost, and their own parsers."""

from __future__ import annotations

import csv
import importlib
import io
import json
import shlex
import tomllib
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import engine_options as options
import msgspec
import pytest
from cli_calls import call, fresh
from engine_options import need
from golden_plans import program_of
from sample_plans import plan as sample_plan

from fxpart.compiler import BLOCKS_KEY
from fxpart.errors import FxpartError
from fxpart.interop.engines import ENGINES, EngineConfiguration, PlanDegrees, find_degrees
from fxpart.interop.engines.argument_file import parse_arguments
from fxpart.interop.engines.megatron import find_layout
from fxpart.interop.engines.torch_schedules import SCHEDULE_NAMES, find_stage_ranks
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.constraints.megatron_layout import compute_layout_starts, expand_layout

# Twenty plans of every kind: chains, meshes, ZeRO, heterogeneous devices, replicas, queues,
# asynchronous, every schedule, boundaries that the user fixed.
NAMES = (
    "chain_layers", "chain_cp_sat", "mesh_data_stages", "mesh_zero_1", "mesh_zero_2",
    "mesh_bf16", "fixed_layout", "unlike_chain", "unlike_copies", "async_spectrain",
    "queue_wide", "queue_copies",
    "interleaved", "breadth_first", "zero_bubble", "zero_bubble_v", "all_at_once",
    "searched_schedule", "fixed_stages_of_blocks", "fixed_degrees",
)  # fmt: skip
pytestmark = pytest.mark.slow


@cache
def degrees_of(name: str) -> PlanDegrees:
    program = program_of(name)
    return find_degrees(program.plan, [b.name for b in program.prepared.meta[BLOCKS_KEY]])


def written(name: str, engine: str) -> EngineConfiguration:
    return ENGINES[engine].write(degrees_of(name))


def flat(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def test_cases_are_twenty() -> None:
    assert len(set(NAMES)) == 20


@pytest.mark.parametrize("name", NAMES)
def test_option_names_and_values_are_those_of_the_engine(name: str) -> None:
    degrees = degrees_of(name)
    text = written(name, "torchtitan").files["torchtitan.args"]
    for option, values in parse_arguments(text, name).items():
        if option in options.TORCHTITAN:
            assert options.is_allowed(values[0], options.TORCHTITAN[option]), (option, values)
        else:
            assert option in options.TORCHTITAN_ALONE, option
    assert any(f"activation-checkpoint:{mode}" in text for mode in options.CHECKPOINTING)
    old = tomllib.loads(written(name, "torchtitan").files["torchtitan.toml"])
    assert old.pop("activation_checkpoint")["mode"] == degrees.recompute
    for option, value in flat(old):
        if option not in options.TORCHTITAN_ALONE:
            assert options.is_allowed(value, options.TORCHTITAN[option]), (option, value)
    found = parse_arguments(written(name, "megatron").files["megatron.args"], name)
    for option, values in found.items():
        value: Any = values[0] if values else ""
        assert options.is_allowed(value, options.MEGATRON[option]), (option, values)
    for option, value in flat(json.loads(written(name, "deepspeed").files["ds_config.json"])):
        assert options.is_allowed(value, options.DEEPSPEED[option]), (option, value)
    yaml = pytest.importorskip("yaml")
    for option, value in flat(yaml.safe_load(written(name, "accelerate").files["accelerate.yaml"])):
        assert options.is_allowed(value, options.ACCELERATE[option]), (option, value)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_plan_are_in_every_configuration(name: str) -> None:
    degrees, plan = degrees_of(name), program_of(name).plan
    assert degrees.microbatch_rows * degrees.microbatches * degrees.data == plan.batch_size
    assert degrees.world == len(plan.firsts) * len(plan.stages[0].ranks)
    config = json.loads(written(name, "deepspeed").files["ds_config.json"])
    assert config["train_batch_size"] == plan.batch_size
    assert config["gradient_accumulation_steps"] == plan.microbatches
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(written(name, "accelerate").files["accelerate.yaml"])
    assert found["num_processes"] == degrees.world


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_what_is_written_is_read_again(name: str, engine: str) -> None:
    """What the engine can express comes back as the constraints of the same plan."""
    degrees, made = degrees_of(name), written(name, engine)
    for file, text in made.files.items():
        if file.startswith("schedule"):
            continue
        spec = ENGINES[engine]
        assert spec.read is not None and spec.looks_like is not None and spec.looks_like(text)
        run = spec.read(text, file).resolve(degrees.world)
        found = run.constraints
        assert (found["tp"], found["pp"], found["dp"]) == (
            degrees.tensor, degrees.pipeline, degrees.data,
        )  # fmt: skip
        assert found["recompute"] == degrees.recompute
        assert run.batch_size == degrees.plan.batch_size
        assert found["microbatches"] == degrees.microbatches
        assert found.get("precision", "fp32") == degrees.plan.precision
        zero = {1: 2}.get(degrees.zero, degrees.zero) if engine == "torchtitan" else degrees.zero
        assert found["zero"] == zero
        if "layout" in found:
            assert expand_layout(str(found["layout"])) == expand_layout(find_layout(degrees) or "")


@pytest.mark.parametrize("name", NAMES)
def test_layout_divides_the_model_as_the_plan_does(name: str) -> None:
    """The planner's own reader of layouts is the oracle for where stages begin."""
    degrees, program = degrees_of(name), program_of(name)
    layout = find_layout(degrees)
    if layout is None or degrees.inside or program.plan.schedule == "zb-v":
        assert program.plan.replicas or degrees.virtual > 1
        return
    blocks = [block.name for block in program.prepared.meta[BLOCKS_KEY]]
    starts = tuple(first for first, _, _ in program.plan.program_stages)
    if not all(degrees.layers[k][0] < degrees.layers[k][1] for k in range(len(starts))):  # type: ignore[index]
        assert name == "fixed_stages_of_blocks"
        return
    assert compute_layout_starts(layout, blocks) == starts


@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_the_schedule(name: str) -> None:
    """By torch's parser and its check of complete schedules; known names are classes."""
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    made = written(name, "torch-pipelining")
    config = json.loads(made.files["torch_pipelining.json"])
    assert schedules.get_schedule_class(config["schedule"])
    degrees = degrees_of(name)
    ranks = find_stage_ranks(degrees)
    assert config["num_stages"] == len(ranks) and set(ranks) == set(range(degrees.pipeline))
    if config["schedule_csv"] is None:
        return
    rows = list(csv.reader(io.StringIO(made.files["schedule.csv"])))
    actions = {rank: [schedules._Action.from_str(a) for a in row] for rank, row in enumerate(rows)}
    mapping = schedules._validate_schedule(
        actions, degrees.pipeline, len(ranks), degrees.microbatches
    )
    assert mapping == dict(enumerate(ranks))


@pytest.mark.parametrize("name", [n for n in SCHEDULE_NAMES if SCHEDULES[n].is_virtual])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_named_schedules_are_those_of_torch(name: str, ranks: int, microbatches: int) -> None:
    """torch's class makes the same order of computations, where its name is written."""
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    spec = SCHEDULES[name]
    like: Any = types.SimpleNamespace(
        num_stages=2 * ranks, group_size=ranks, group_rank=0, stage_index=0, is_last=False,
        submod=None,
    )  # fmt: skip
    made = schedules.get_schedule_class(SCHEDULE_NAMES[name])([like] * 2, microbatches)
    theirs = [
        [str(action) for action in made.pipeline_order[rank] if action is not None]
        for rank in range(ranks)
    ]
    ours = spec(spec.assign_ranks(ranks, 2), microbatches)
    same = theirs == [[str(a) for a in row if a.kind.is_compute] for row in ours.ranks]
    assert same is (name != "breadth-first"), "find_schedule writes breadth-first as CSV"


def test_what_is_lost_is_listed() -> None:
    def lost(name: str, engine: str = "megatron") -> str:
        return " ".join(written(name, engine).lost)

    assert "asynchronous pipeline with weights 'spectrain'" in lost("async_spectrain")
    assert "Queues with staleness" in lost("queue_wide")
    assert "Replicas of single stages" in lost("queue_copies")
    assert "schedule gpipe: Megatron-LM runs 1f1b" in lost("all_at_once")
    assert "Virtual stages in a V" in lost("zero_bubble_v")
    assert lost("interleaved") == lost("chain_layers") == ""
    assert "ZeRO 1: FSDP2" in lost("mesh_zero_1", "torchtitan")
    assert "ZeRO 2: pipelines of DeepSpeed allow ZeRO 1" in lost("mesh_zero_2", "deepspeed")
    assert "Stages of 5, 3 layers" in lost("forbidden_cut", "deepspeed")
    assert "2 virtual stages per rank" in lost("interleaved", "accelerate")
    assert lost("zero_bubble", "torchtitan") == ""  # the CSV has it


def test_stages_of_different_degrees_are_lost() -> None:
    plan = sample_plan(4)
    first, second, third, fourth = plan.stages
    wide = msgspec.structs.replace(second, ranks=(1, 2), tensor_parallel=2, last=third.last)
    last = msgspec.structs.replace(fourth, index=2)
    degrees = find_degrees(msgspec.structs.replace(plan, stages=(first, wide, last)))
    assert (degrees.data, degrees.tensor, degrees.pipeline, degrees.world) == (1, 1, 3, 3)
    (sentence,) = [line for line in degrees.lost if "Degrees" in line]
    assert "stage 1: dp1 tp2 zero0" in sentence
    unknown = " ".join(ENGINES["megatron"].write(degrees).lost)
    assert "names of the model's layers are not known" in unknown


def test_command_writes_files_and_lists_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    sample_plan(4).dump(path)
    out, _ = call(capsys, "export", str(path), "--to", "megatron", "-o", str(tmp_path / "new/m"))
    assert "lost: The stage boundaries" in out and "xargs torchrun" in out
    words = shlex.split((tmp_path / "new/m/megatron.args").read_text(), comments=True)
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "4"
    out, _ = call(capsys, "export", str(path), "--to", "deepspeed", "--json")
    found = json.loads(out)
    assert found["engine"] == "deepspeed" and found["version"] == "0.19.8" and found["lost"]
    assert json.loads(found["files"]["ds_config.json"])["pipeline"]["stages"] == 4
    _, err = call(capsys, "export", str(path), "--to", "nemo", status=2)
    assert "FXP109" in err and "torch-pipelining" in err
    _, err = call(capsys, "export", str(path), "--to", "megatron", "-o", "/proc/none", status=4)
    assert "FXP603" in err
    path.write_text("{")
    _, err = call(capsys, "export", str(path), "--to", "megatron", status=2)
    assert "FXP301" in err
    _, err = call(capsys, "export", "any.py:thing", status=2)
    assert "--to ENGINE" in err


def test_export_needs_neither_torch_nor_or_tools(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan(4).dump(path)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'ortools'), None))\n"
        "from fxpart.cli import main; main(sys.argv[1:])"
    )
    for engine in ENGINES:
        found = fresh("export", str(path), "--to", engine, code=code)
        assert found.returncode == 0 and "launch: " in found.stdout, found.stderr


# What follows uses the engines' own parsers, where their packages are installed.


def test_each_engine_has_its_row_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "fxpart/docs/other_engines.md").read_text(encoding="utf-8")
    for name in ENGINES.builtin:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert ENGINES[name].version in row and ENGINES[name].summary.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_parses_its_arguments(name: str) -> None:
    need("torchtitan", "torchtitan.models.llama3.config_registry")
    manager = need("torchtitan", "torchtitan.config").ConfigManager()
    text = written(name, "torchtitan").files["torchtitan.args"]
    model = ["--module", "llama3", "--config", "llama3_debugmodel"]
    found = manager.parse_args([*model, *shlex.split(text, comments=True)])
    degrees = degrees_of(name)
    assert found.parallelism.pipeline_parallel_degree == degrees.pipeline
    assert found.parallelism.tensor_parallel_degree == degrees.tensor
    assert found.training.global_batch_size == degrees.plan.batch_size
    parts = found.parallelism.module_fqns_per_model_part or []
    assert len(parts) in (0, degrees.pipeline * degrees.virtual)


@pytest.mark.parametrize("name", NAMES)
def test_megatron_parses_its_layout(name: str) -> None:
    module = need("megatron", "megatron.core.transformer.pipeline_parallel_layer_layout")
    degrees = degrees_of(name)
    layout = find_layout(degrees)
    if layout is not None:
        found = module.PipelineParallelLayerLayout(layout, degrees.pipeline)
        assert found.virtual_pipeline_model_parallel_size == degrees.virtual
        found.validate_layer_layout(degrees.layer_count, None)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_accepts_its_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = need("deepspeed", "deepspeed.runtime.config")
    degrees = degrees_of(name)
    monkeypatch.setattr(module.dist, "get_rank", lambda *_: 0)
    ranks = types.SimpleNamespace(get_data_parallel_world_size=lambda: degrees.data)
    config = json.loads(written(name, "deepspeed").files["ds_config.json"])
    found = module.DeepSpeedConfig(config, mpu=ranks)
    assert found.train_batch_size == degrees.plan.batch_size


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    module = need("accelerate", "accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(written(name, "accelerate").files["accelerate.yaml"])
    found = module.load_config_from_file(str(path))
    launch = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    known = {action.dest for action in launch._actions}
    for section in (found.fsdp_config, found.megatron_lm_config, found.parallelism_config):
        assert set(section) <= known
    assert found.num_processes == degrees_of(name).world


def test_a_package_adds_an_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from fxpart.interop.engines import EngineSpec

    spec = EngineSpec(
        name="mine", package="mine", version="1", summary="Mine.",
        write=lambda degrees: EngineConfiguration({"mine.txt": str(degrees.world)}, "mine"),
    )  # fmt: skip
    ENGINES.register("mine", spec)
    try:
        sample_plan(4).dump(tmp_path / "plan.json")
        out, _ = call(capsys, "export", str(tmp_path / "plan.json"), "--to", "mine")
        assert "# mine.txt\n4" in out and "lost: nothing" in out
        with pytest.raises(FxpartError) as wrong:
            ENGINES.register("other", spec)
        assert wrong.value.code == "FXP109"
    finally:
        ENGINES.unregister("mine")
    assert "mine" not in ENGINES
