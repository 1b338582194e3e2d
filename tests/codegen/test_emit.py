"""The emitted text: the same bytes each time, readable, nothing kept longer than needed."""

from __future__ import annotations

import ast
import hashlib
import linecache
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from random_models import EXACT, FLOATING, RandomModel, Step
from ranks import python_path
from stage_runs import Stages, assigned, captured_of, prepared, tensors
from torch import nn

import fxpart
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_loader import load_stage
from fxpart.codegen.stage_split import split
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY
from fxpart.program.spec import dim_value


def everything(kinds: tuple[str, ...] = FLOATING) -> RandomModel:
    """A model with one step of each kind."""
    steps = tuple(Step(kind, i + 1, max(0, i - 2), i) for i, kind in enumerate(kinds))
    return RandomModel(steps, (3,), exact=False, seed=5)


def build(model: RandomModel, stages: int = 3, *, keep_outputs: bool = False) -> Stages:
    captured = captured_of(model.build(), model.batch(), batch_size=4, batch_dims={"mask": None})
    graph = prepared(captured)
    closed = set(graph.meta[NO_CUT_KEY])
    possible = [b for b in range(1, len(graph.meta[BLOCKS_KEY])) if b - 1 not in closed]
    step = max(1, len(possible) // (stages - 1))
    starts = [0, *possible[step - 1 :: step][: stages - 1]]
    return Stages(captured, assigned(graph, starts), keep_outputs=keep_outputs)


@pytest.fixture(scope="module")
def built() -> Stages:
    return build(everything())


def digest() -> str:
    """Of all texts of a model that has everything; also run in another process."""
    text = "\f".join(build(everything()).sources)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.slow
def test_emitting_twice_gives_the_same_text(built: Stages) -> None:
    assert [emit(stage) for stage in built.graphs] == built.sources


@pytest.mark.slow
def test_another_process_with_another_hash_seed_gives_the_same_text() -> None:
    root = Path(__file__).parents[2]
    found = set()
    for seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = python_path(
            root, root / "tests" / "support", Path(__file__).parent
        )
        code = "import sys, test_emit; sys.stdout.write(test_emit.digest())"
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        found.add(run.stdout)
    assert len(found) == 1


@pytest.mark.slow
def test_no_path_of_this_machine(built: Stages) -> None:
    for source in built.sources:
        for path in (
            str(Path.cwd()),
            str(Path.home()),
            sys.prefix,
            str(Path(torch.__file__).parent),
        ):
            assert path not in source


@pytest.mark.slow
def test_one_operation_a_line_with_its_place(built: Stages) -> None:
    for stage, source in zip(built.graphs, built.sources, strict=True):
        lines = source.splitlines()
        ops = [n for n in stage.graph.nodes if n.op == "call_function"]
        body = lines[next(i for i, t in enumerate(lines) if "def forward" in t) + 1 :]
        statements = [t for t in body if t.strip() and not t.strip().startswith("#")]
        assert len(statements) == len(ops) + 1  # and the return
        assert lines[0].startswith(f"# Stage {stage.spec.index} of Net")
    assert any("# layers.step" in source for source in built.sources)
    assert any("# f64[s" in source for source in built.sources)


@pytest.mark.slow
def test_every_tensor_is_freed_after_its_last_use(built: Stages) -> None:
    for source in built.sources:
        tree = ast.parse(source)
        (forward,) = (
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "forward"
        )
        alive = {a.arg for a in forward.args.args} - {"self", "key"}
        for position, statement in enumerate(forward.body[:-1]):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    alive.add(name)
                case ast.Delete(targets=targets):
                    alive -= {t.id for t in targets if isinstance(t, ast.Name)}
            rest = {
                n.id
                for later in forward.body[position + 1 :]
                for n in ast.walk(later)
                if isinstance(n, ast.Name)
            }
            unused = alive - rest
            # what the next statement deletes is among the rest
            assert not {name for name in unused if not _size(name, built)}, statement.lineno


def _size(name: str, built: Stages) -> bool:
    """Sizes are numbers and stay."""
    values = (n.meta.get("val") for s in built.graphs for n in s.graph.nodes if n.name == name)
    return any(not isinstance(v, torch.Tensor | tuple | list) for v in values)


def test_stages_run_with_other_sizes_than_captured(built: Stages) -> None:
    model = everything()
    for rows in (2, 4, 7):
        inputs = tensors(built.captured, model.batch(rows))
        values = built.run(inputs, 3)
        assert torch.isfinite(values[built.spec.loss])


def test_all_dropouts_are_keyed(built: Stages) -> None:
    inputs = tensors(built.captured, everything().batch())
    torch.manual_seed(0)
    first = built.run(inputs, 3)[built.spec.loss]
    torch.manual_seed(1)
    assert torch.equal(first, built.run(inputs, 3)[built.spec.loss])
    assert sum(stage.random_ops for stage in built.spec.stages) == 2


def test_tracebacks_show_the_line(built: Stages) -> None:
    module = built.modules[0]
    count = len(built.spec.stages[0].inputs)
    with pytest.raises(Exception) as caught:
        module(0, *[torch.zeros(3, 3, 3, 3)] * count)
    frames = traceback.extract_tb(caught.value.__traceback__)
    ours = next(f for f in frames if f.filename.startswith("<fxpart stage 0"))
    assert ours.line and "aten" in ours.line
    linecache.checkcache()
    assert linecache.getline(ours.filename, ours.lineno or 0).strip() == ours.line


@pytest.mark.slow
def test_user_outputs_are_kept_on_demand() -> None:
    model = everything(EXACT)
    with_outputs, without = build(model, keep_outputs=True), build(model)
    assert without.spec.outputs == ()
    assert len(with_outputs.spec.outputs) == len(with_outputs.captured.outputs)
    inputs = tensors(with_outputs.captured, model.batch())
    values = with_outputs.run(inputs, 1)
    expected = without.captured.eager(model.batch())  # type: ignore[misc]
    named = zip(with_outputs.spec.outputs, with_outputs.captured.outputs, strict=True)
    for (value, _), want in zip(named, expected[1:], strict=True):
        assert torch.equal(values[value], want)


def test_devices_are_chosen_when_the_stage_is_made(built: Stages) -> None:
    assert not any('"cpu")' in t for s in built.sources for t in s.splitlines() if "aten" in t)
    spec, stages = split(assigned(prepared(built.captured), [0]), built.captured)
    module = load_stage(emit(stages[0]), spec.stages[0], "meta")
    assert module.device == torch.device("meta")
    sizes = dict.fromkeys(spec.symbols, 4)
    inputs = [
        torch.empty(
            [dim_value(d, sizes) for d in v.shape], dtype=getattr(torch, v.dtype), device="meta"
        )
        for v in spec.stages[0].inputs
    ]
    # Everything is on meta: it runs only if new tensors are made there too.
    (loss,) = module(0, *inputs)
    assert loss.device.type == "meta"


@pytest.mark.slow
def test_views_do_not_depend_on_the_strides_of_a_device() -> None:
    """Attention kernels of other devices return other strides; a view of them would fail."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(-1, 4).sum()

    x = torch.ones(2, 8)
    program = fxpart.compile(Viewed(), "local:1", example_inputs=(x,), constraints={"stages": 1})
    assert "aten.reshape" in program.sources[0] and "aten.view" not in program.sources[0]
