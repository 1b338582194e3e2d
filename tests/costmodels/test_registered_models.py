"""A cost model from outside fxpart: by decorator, by entry point, as an instance, and refused."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fxpart.costmodels import COST_MODELS, find
from fxpart.costmodels.profile_store import ContentionProfile
from outside_cost_model import FlatRate
from structure import ROOT, nodes_of, sources, text_of

import fxpart
from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.costs import NO_KNOWLEDGE, DeviceKnowledge
from fxpart.errors import FxpartError

SUPPORT = ROOT / "tests" / "support"


@pytest.fixture
def registered() -> Iterator[None]:
    fxpart.register_cost_model(FlatRate.name)(FlatRate)
    yield
    COST_MODELS.unregister(FlatRate.name)


def compiled(cost_model: object, **arguments: Any) -> fxpart.Program:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    return fxpart.compile(
        model, "local:2", example_inputs=(torch.randn(8, 16), torch.randn(8, 16)),
        loss=torch.nn.functional.mse_loss, cost_model=cost_model,
        constraints={"mesh": "none", "stages": 2}, **arguments,
    )  # fmt: skip


@pytest.mark.slow
def test_a_registered_model_is_used_by_name_and_as_an_instance(registered: None) -> None:
    cluster = Cluster.local(2)
    assert find(FlatRate.name, cluster) == FlatRate(2)
    by_name, instance = (compiled(model).plan for model in (FlatRate.name, FlatRate()))
    assert by_name.provenance["compute"] == by_name.provenance["transfers"] == "flat-rate"
    assert by_name.prediction == instance.prediction
    assert by_name.prediction != compiled("auto").plan.prediction


@pytest.mark.slow
def test_knowledge_of_an_outside_model_decides_what_is_compared() -> None:
    """With contention plans carry simulated seconds of hosts; a slowdown lengthens the update."""

    class Contended(FlatRate):
        def knowledge(self, device: Device) -> DeviceKnowledge:
            curve = ContentionProfile(slowdown=(1.0, 3.0), baseline=2**20, overhead=0.5)
            return DeviceKnowledge(action=0.25, step=0.5, slowdown=3.0, contention=curve)

    plain, contended = (compiled(model()).plan for model in (FlatRate, Contended))
    # The step contains 3 x 0.5 s once and 3 x 0.25 s for every forward and backward.
    least = 3.0 * (0.5 + 2 * 0.25 * contended.microbatches)
    assert contended.prediction.step_seconds > least > plain.prediction.step_seconds
    assert contended.prediction.hosts and contended.prediction.hosts[0].slowdown == (1.0, 3.0)
    assert {row.process for row in contended.prediction.ranks} == {2**20}
    assert {row.process for row in plain.prediction.ranks} == {0}


def test_defaults_know_nothing() -> None:
    model = FlatRate()
    device = Cluster.local(1).devices[0]
    assert model.knowledge(device) is NO_KNOWLEDGE
    assert model.for_model("a") is model and model.for_part(Cluster.local(1)) is model


@pytest.mark.slow
def test_an_installed_package_adds_a_model_that_the_command_line_uses(tmp_path: Path) -> None:
    info = tmp_path / "flat_rate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-rate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fxpart.costmodels]\nflat-rate = outside_cost_model:FlatRate\n"
    )
    (tmp_path / "model.py").write_text(
        textwrap.dedent("""
            import torch, fxpart

            def make():
                return fxpart.Workload(
                    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
                    (torch.randn(4, 4), torch.randn(4, 4)), loss=torch.nn.functional.mse_loss,
                )
        """)
    )
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SUPPORT)!r}, {str(ROOT)!r}]\n"
        "from fxpart.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", f"{tmp_path / 'model.py'}:make", "-c", "local:2",
         "--cost-model", "flat-rate", "-o", str(tmp_path / "out.plan.json")],
        capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = msgspec.json.decode((tmp_path / "out.plan.json").read_bytes())
    assert plan["provenance"]["transfers"] == "flat-rate"


def test_refused_models(registered: None) -> None:
    with pytest.raises(FxpartError, match="exists already") as caught:
        fxpart.register_cost_model("roofline")(FlatRate)
    assert caught.value.problems[0].code == "FXP109"
    for name in ("auto", "a.profile"):
        with pytest.raises(FxpartError, match="another meaning"):
            fxpart.register_cost_model(name)(FlatRate)
    with pytest.raises(FxpartError, match="other object"):
        COST_MODELS.register("instance", FlatRate())  # type: ignore[type-var]

    class Half:
        name = "half"

        def op(self, *_: object) -> None: ...

    with pytest.raises(FxpartError, match=r"no (.|\n)*reshard, transfer(.|\n)*knowledge"):
        fxpart.register_cost_model("half")(Half)  # type: ignore[type-var]
    with pytest.raises(FxpartError, match=r"cost_model=Half(.|\n)*fxpart.costs.CostModel"):
        compiled(Half())
    with pytest.raises(FxpartError, match=r"auto, roofline, flat-rate"):
        find("crystal-ball")


@pytest.mark.slow
def test_nobody_asks_for_the_class_of_a_cost_model() -> None:
    """Neither isinstance nor an import of a class of the table outside the folder of the models."""
    classes = {kind.__name__ for kind in COST_MODELS.values()} | {"ProfileCostModel", "CostModel"}
    wrong = []
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and text_of(node.func) in (
                "isinstance",
                "issubclass",
            ):
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if names & classes or any(n.endswith("CostModel") for n in names):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and not path.is_relative_to(ROOT / "costmodels"):
                if {alias.name for alias in node.names} & (classes - {"CostModel"}):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_names_of_models_stand_in_the_table_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if not path.is_relative_to(ROOT / "costmodels")
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in COST_MODELS.builtin
    ]
    assert not wrong
