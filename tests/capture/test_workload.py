"""Targets: every form that is taken, and an error with the user's line for all else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from fxpart.capture.workload import Workload, load_target
from fxpart.errors import FxpartError

GOOD = """
import torch
from torch import nn
import fxpart
import neighbour_of_target

example = (torch.zeros(2, 3),)

def model(): return nn.Linear(3, 3)
def pair(): return nn.Linear(3, 3), example
def listed(): return nn.Linear(3, 3), [torch.zeros(2, 3)]
def named(): return nn.Linear(3, 3), {"input": example[0]}
def workload(): return fxpart.Workload(nn.Linear(3, 3), example=example, batch_size=4)
def optional(width=3): return nn.Linear(width, 3)
class Net(nn.Linear):
    def __init__(self): super().__init__(3, 3)
there = nn.Linear(3, 3)
ready = fxpart.Workload(there)

def number(): return 5
def wrong_pair(): return nn.Linear(3, 3), 5
def triple(): return nn.Linear(3, 3), example, 1
def hollow(): return fxpart.Workload(5)
def needs(width): return nn.Linear(width, 3)
def fails():
    return deeper({})
def deeper(config):
    return config["hidden"]
def leaves(): raise SystemExit(3)
def fxpart_error():
    raise fxpart.FxpartError(fxpart.Problem("FXP109", "here", "because", ""))
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    """A target file with a neighbour; the search path is put back."""
    path, before = tmp_path / "targets.py", list(sys.path)
    path.write_text(GOOD)
    (tmp_path / "neighbour_of_target.py").write_text("")
    yield str(path)
    sys.path[:] = before
    for name in ("neighbour_of_target", "fxpart_target_targets"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name",
    ["model", "pair", "listed", "named", "workload", "optional", "Net", "there", "ready"],
)
def test_forms(file: str, name: str) -> None:
    found = load_target(f"{file}:{name}")
    assert isinstance(found.model, nn.Linear)
    kinds = {"pair": tuple, "listed": tuple, "workload": tuple, "named": dict}
    assert type(found.example) is kinds.get(name, type(None))
    assert found.batch_size == (4 if name == "workload" else None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "it returns a int"),
        ("wrong_pair", "its second result is a int"),
        ("triple", "it returns a tuple"),
        ("hollow", "the model of its Workload is a int"),
        ("needs", "missing a required argument: 'width'"),
        ("example", "example is a tuple, not a function"),
        ("nothing", "the module has no nothing"),
        ("leaves", "SystemExit: 3"),
    ],
)
def test_what_is_not_taken(file: str, name: str, words: str) -> None:
    with pytest.raises(FxpartError) as caught:
        load_target(f"{file}:{name}")
    assert caught.value.code == "FXP107"
    assert words in str(caught.value)


def test_own_exception_shows_the_line(file: str) -> None:
    with pytest.raises(FxpartError) as caught:
        load_target(f"{file}:fails")
    (problem,) = caught.value.problems
    line = GOOD.splitlines().index('    return config["hidden"]') + 1
    assert problem.where == f"{file}:{line}"
    assert problem.why == "KeyError: 'hidden' (in fails())\nreturn config[\"hidden\"]"
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_fxpart_pass_through(file: str) -> None:
    with pytest.raises(FxpartError) as caught:
        load_target(f"{file}:fxpart_error")
    assert caught.value.code == "FXP109"


def test_names_that_are_there_are_told(file: str) -> None:
    with pytest.raises(FxpartError, match="use one of its functions: model, pair, listed"):
        load_target(f"{file}:nothing")


@pytest.mark.parametrize("text", ["", "x", ":", "a.py", "a.py:", ":f", "nowhere.py:f"])
def test_no_place(text: str) -> None:
    with pytest.raises(FxpartError) as caught:
        load_target(text)
    assert caught.value.code == "FXP107"


@pytest.mark.parametrize(
    ("source", "where", "words"),
    [
        ("x = (\n", ":1", "SyntaxError"),
        ("import torch\n\nimport no_such_package_xyz\n", ":3", "no_such_package_xyz"),
        ("def f(): pass\n1 / 0\n", ":2", "ZeroDivisionError"),
    ],
)
def test_file_that_fails(tmp_path: Path, source: str, where: str, words: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(FxpartError) as caught:
        load_target(f"{path}:f")
    (problem,) = caught.value.problems
    assert problem.where == f"{path}{where}" and words in problem.why
    assert "fxpart_target_broken" not in sys.modules


def test_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "pkg_of_target"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("from torch import nn\ndef f(): return nn.Linear(1, 1)\n")
    (package / "bad.py").write_text("x = 1\nimport no_such_package_xyz\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_target("pkg_of_target.good:f").model, nn.Linear)
    with pytest.raises(FxpartError, match="there is no module pkg_of_target.none"):
        load_target("pkg_of_target.none:f")
    with pytest.raises(FxpartError) as caught:
        load_target("pkg_of_target.bad:f")
    assert caught.value.problems[0].where == f"{package / 'bad.py'}:2"


def test_data_from_its_start() -> None:
    model = nn.Linear(1, 1)
    assert Workload(model).batches() is None
    assert Workload(model, data=[1, 2]).batches() == [1, 2]
    again = Workload(model, data=lambda: iter([1]))
    first, second = again.batches(), again.batches()
    assert first is not None and second is not None
    assert [list(first), list(second)] == [[1], [1]]


def test_weights_are_drawn_by_the_seed(file: str) -> None:
    """Ranks load a target each by itself."""
    first, again = (load_target(f"{file}:model").model.state_dict() for _ in range(2))
    other = load_target(f"{file}:model", seed=1).model.state_dict()
    assert all(first[name].equal(again[name]) for name in first)
    assert not any(first[name].equal(other[name]) for name in first)
