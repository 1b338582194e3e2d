"""fxpart.annotate: keys, files, DTensors, and what is wrong with them, all at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from sharded_graphs import FeedForward, Layer
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

import fxpart
from fxpart.annotations import (
    annotations_of,
    annotations_of_batch,
    annotations_of_inputs,
    gather_batch_dtensors,
    gather_model_dtensors,
    load_annotations,
)
from fxpart.annotations.entry_syntax import AnnotationKey, merge_annotations, read_placements
from fxpart.annotations.files import parse_annotations
from fxpart.errors import FxpartError


def test_it_gives_the_model_back_and_adds() -> None:
    model = FeedForward()
    assert fxpart.annotate(model, {"up.weight": "tp:S(0)"}) is model
    fxpart.annotate(model, {"up.weight": "dp:R", "input:x": "dp:S(0)"})
    assert annotations_of(model) == {"up.weight": "tp:S(0),dp:R", "input:x": "dp:S(0)"}
    assert annotations_of(copy.deepcopy(model)) == annotations_of(model)
    assert set(model.state_dict()) == set(FeedForward().state_dict())
    assert annotations_of(FeedForward()) == {}


def problems(model: nn.Module, given_: object) -> list[tuple[str, str]]:
    with pytest.raises(FxpartError) as caught:
        fxpart.annotate(model, given_)  # type: ignore[arg-type]
    return [(p.code, f"{p.where}: {p.why}") for p in caught.value.problems]


def test_everything_wrong_is_said_at_once() -> None:
    wrong = {
        "*.wieght": "tp:S(0)",
        "up.weight": "tp:S(2)",
        "*.bias": "tp:P",
        "module:upp": "tp:S(0)",
        "down.weight": "tp:S(1,3)",
        "node:linear": "tp:S(9)",
    }
    found = problems(FeedForward(), wrong)
    assert len(found) == 7
    assert {code for code, _ in found} == {"FXP111"}
    texts = "\n".join(text for _, text in found)
    assert "'*.wieght': the model has no such parameter" in texts
    assert "there is no dim 2" in texts
    assert "norm.bias, tp:P" in texts
    assert "the model has no such module" in texts
    assert "not 3 equal parts" in texts


@pytest.mark.parametrize(
    "text", ["tp", "tp=S(0)", "tp:S0", "TP:R", "tp:R,tp:R", "", "tp:S(0,1)", ":R", "tp:S(-1)"]
)
def test_values_that_are_no_placements(text: str) -> None:
    ((code, message),) = problems(FeedForward(), {"up.weight": text})
    assert code == "FXP111"
    assert "'up.weight'" in message


@pytest.mark.parametrize("given_", [{"": "tp:R"}, {"input:": "tp:R"}, {3: "tp:R"}, {"up.bias": 3}])
def test_keys_and_values_that_are_none(given_: dict[str, str]) -> None:
    assert problems(FeedForward(), given_)[0][0] == "FXP111"


def test_a_model_is_needed() -> None:
    assert problems("model", {"x": "tp:R"})[0][0] == "FXP111"  # type: ignore[arg-type]


def test_contradictions_are_errors_at_once() -> None:
    model = fxpart.annotate(FeedForward(), {"up.weight": "tp:S(0)"})
    ((code, message),) = problems(model, {"up.weight": "tp:S(1)"})
    assert (code, "tp:S(0) before, but tp:S(1) now" in message) == ("FXP112", True)
    ((code, message),) = problems(model, {"*p.weight": "tp:S(1)"})
    assert (code, "'up.weight' requests tp:S(0), but '*p.weight' requests tp:S(1)" in message) == (
        "FXP112",
        True,
    )
    assert annotations_of(model) == {"up.weight": "tp:S(0)"}
    fxpart.annotate(model, {"*.weight": "dp:S(0)"})


def test_patterns() -> None:
    names = dict.fromkeys(["a.0.w", "a.10.w", "a.0.b.w", "x[0].w"])
    assert AnnotationKey.parse("a.*.w").select(names) == ["a.0.w", "a.10.w", "a.0.b.w"]
    assert AnnotationKey.parse("a.[0-9].w").select(names) == ["a.0.w"]
    assert AnnotationKey.parse("x[0].w").select(names) == ["x[0].w"]
    assert AnnotationKey.parse("w").select(names) == []
    assert AnnotationKey.parse("input:a*") == AnnotationKey("input", "a*")
    assert AnnotationKey.parse("other:a*") == AnnotationKey("state", "other:a*")


PLACEMENTS = st.sampled_from(["R", "S(0)", "S(1)", "S(1,3)", "P", "?"])


@given(
    st.dictionaries(st.sampled_from("abc"), PLACEMENTS), st.dictionaries(st.just("c"), PLACEMENTS)
)
def test_merging_loses_nothing(old: dict[str, str], new: dict[str, str]) -> None:
    texts = [",".join(f"{k}:{v}" for k, v in d.items()) for d in (old, new)]
    one, two = (read_placements(t) for t in texts)
    try:
        both = merge_annotations({"w": texts[0]}, {"w": texts[1]})
    except FxpartError:
        assert one["c"] != two["c"]
        return
    assert read_placements(both["w"]) == {**one, **two}


def test_files(tmp_path: Path) -> None:
    entries = {"up.weight": "tp:S(0)", "input:x": "dp:S(0)", 'odd "name"*': "tp:R"}
    (tmp_path / "a.json").write_text(json.dumps({"mesh": "dp=2,tp=2", "annotations": entries}))
    rows = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in entries.items()]
    (tmp_path / "a.toml").write_text("\n".join(["[annotations]", *rows]))
    assert load_annotations(tmp_path / "a.json") == entries
    assert load_annotations(tmp_path / "a.toml") == entries
    del entries['odd "name"*']
    (tmp_path / "b.json").write_text(json.dumps({"annotations": entries}))
    model = fxpart.annotate(FeedForward(), tmp_path / "b.json")
    assert annotations_of(fxpart.annotate(FeedForward(), str(tmp_path / "b.json"))) == entries
    assert annotations_of(model) == entries


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1),
        ("annotations = 3", 1),
        ("[annotations", 1),
        ('mesh = "dp=2"\n[annotations]\nw = "tp:R"\nv = "tp:R"\n"op:x" = "dp:b,tp:k"', 3),
        ('mesh = "dp"\n[annotations]\nw = "tp:R"', 1),
        ("mesh = 3\n[annotations]", 1),
        ('format = "2"\nmash = 1\n[annotations]\nw = "tp"\nv = 3', 4),
    ],
)
def test_files_that_are_wrong(text: str, count: int) -> None:
    with pytest.raises(FxpartError) as caught:
        parse_annotations(text)
    assert [p.code for p in caught.value.problems] == ["FXP111"] * count


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("none.toml", "list.txt", "bytes.toml"):
        with pytest.raises(FxpartError) as caught:
            load_annotations(tmp_path / name)
        assert caught.value.code == "FXP111"


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A world of four, as far as meshes can tell, without any other process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_dtensors_are_annotations() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    model = Layer()
    up = model.mlp.up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Replicate(), Shard(0)]))
    assert annotations_of(model) == {"mlp.up.weight": "dp:R,tp:S(0)"}
    fxpart.annotate(model, {"input:x": "dp:S(0)", "mlp.*.weight": "dp:R"})
    assert annotations_of(model)["mlp.up.weight"] == "dp:R,tp:S(0)"
    rows = distribute_tensor(torch.randn(4, 6, 8), mesh, [Shard(0), Replicate()])
    assert annotations_of_inputs(["x", "y"], [rows, torch.ones(2)]) == {"input:x": "dp:S(0),tp:R"}
    fxpart.annotate(model, {"mlp.up.weight": "tp:S(1)"})
    with pytest.raises(FxpartError) as caught:
        annotations_of(model)
    assert caught.value.code == "FXP112"


@pytest.mark.usefixtures("one_process")
def test_whole_tensors_in_place_of_dtensors() -> None:
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("tp",))
    plain = FeedForward()
    model = copy.deepcopy(plain)
    fxpart.annotate(model, {"input:x": "dp:S(0)"})
    held = distribute_tensor(model.up.weight.detach(), mesh, [Shard(0)])
    model.up.weight = nn.Parameter(held, requires_grad=False)
    model.register_buffer("table", distribute_tensor(torch.arange(3), mesh, [Replicate()]))
    whole = gather_model_dtensors(model)
    assert annotations_of(whole) == annotations_of(model)
    assert annotations_of(whole) == {
        "input:x": "dp:S(0)",
        "up.weight": "tp:S(0)",
        "table": "tp:R",
    }
    assert type(whole.up.weight) is nn.Parameter
    assert not whole.up.weight.requires_grad
    assert torch.equal(whole.up.weight, plain.up.weight)
    assert torch.equal(whole.table, torch.arange(3))  # type: ignore[arg-type]
    assert whole.down.weight is model.down.weight
    assert isinstance(model.up.weight, DTensor)
    assert gather_model_dtensors(plain) is plain
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    batch = gather_batch_dtensors(({"a": rows}, [rows, 3], torch.ones(1)))
    assert type(batch[0]["a"]) is torch.Tensor
    assert batch[1][1] == 3
    paths = {"a": (0, "a"), "b": (1, 1), "c": (2,), "d": (2, "deep")}
    held_batch = ({"a": rows}, [rows, 3], torch.ones(1))
    assert annotations_of_batch(paths, held_batch) == {"input:a": "tp:S(0)"}


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_compile_reads_dtensors() -> None:
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("tp",))
    model = FeedForward()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(0)]))
    rows = distribute_tensor(torch.randn(4, 6, 8), mesh, [Replicate()])
    program = fxpart.compile(
        model,
        "local:2",
        example_inputs=(rows,),
        constraints={"mesh": "tp=2", "placements": "annotated"},
    )
    assert program.annotations == {"up.weight": "tp:S(0)", "input:x": "tp:R"}
    assert program.plan.sharding is not None
    placed = {
        name: group.placements for group in program.plan.sharding.placed for name in group.names
    }
    assert (placed["up.weight"], placed["down.weight"]) == ("tp:S(0)", "tp:S(1)")


@pytest.mark.usefixtures("one_process")
def test_dtensors_that_say_nothing() -> None:
    unnamed = DeviceMesh("cpu", torch.arange(4))
    model = FeedForward()
    held = distribute_tensor(model.up.weight.detach(), unnamed, [Shard(0)])
    model.up.weight = nn.Parameter(held)
    with pytest.raises(FxpartError, match="no mesh_dim_names"):
        annotations_of(model)


@pytest.mark.slow
def test_compile_takes_annotations_of_what_the_loss_does_not_use() -> None:
    model = FeedForward()
    model.idle = nn.Linear(8, 8)
    fxpart.annotate(model, {"*.weight": "dp:R", "idle.weight": "tp:S(0)"})
    rows = torch.randn(4, 6, 8)
    constraints = {"mesh": "dp=1,tp=2", "placements": "annotated"}
    program = fxpart.compile(model, "local:2", example_inputs=(rows,), constraints=constraints)
    assert program.annotations["idle.weight"] == "tp:S(0)"
