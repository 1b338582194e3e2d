"""Hostile files start nothing: no process, socket or import, no code; nothing written outside."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans
from pages import Page

from fuzz.hostile import words
from fuzz.readers import READERS
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.report.html import report_html

# Readers that the tests give bytes, or a database or a locked file of their own making.
IN_MEMORY = {
    "plan", "cluster-json", "cluster-toml", "recording", "recording-compared", "launcher",
    "partition-problem", "placement-problem", "joint-problem", "instance", "profile-rows",
}  # fmt: skip
CHILD = Path(__file__).parent / "hostile.py"


@pytest.fixture(scope="module", params=[100, 300])  # the second is left to `make long`
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one child saw, that read the files of all readers; so many that it changed for each."""
    folder = tmp_path_factory.mktemp("outside")
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), str(request.param)],
        capture_output=True, text=True, timeout=240, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout), "changed": request.param}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_under_an_audit_hook(name: str, said: Any) -> None:
    found = said["readers"][name]
    assert found["files"] > said["changed"]
    assert (found["done"], found["wrong"], said["left"]) == ([], [], [])


@pytest.mark.slow
def test_the_hook_sees_what_it_is_to_see(tmp_path: Path) -> None:
    """A reader that unpickles, and one that follows a path: both are found."""
    code = """
import os, pickle, sys
from pathlib import Path
from fuzz import hostile
watch = hostile.Watch(str(hostile.scratch()), "bad")
sys.addaudithook(watch)
pickle.loads(pickle.dumps(hostile.Payload("true")))
eval("1")
open("/etc/hostname").close()
os.fspath(watch.inside)
watch.reader = ""
print(sorted({line.split()[0] for line in watch.seen}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(CHILD.parents[1])},
    )  # fmt: skip
    assert {"os.system", "pickle.find_class", "compile", "exec", "open"} <= set(
        ast.literal_eval(done.stdout)
    )


MARK = b"the file that is none"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in READERS if name not in IN_MEMORY])
def test_a_pipe_and_a_device_in_place_of_the_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes into the pipe, and the device never ends."""
    reader, write, placed = READERS[name], Path.write_bytes, list[Path]()

    def write_bytes(path: Path, data: bytes) -> int:
        path.unlink(missing_ok=True)
        if data != MARK:
            return write(path, data)
        placed.append(path)
        if len(placed) == 1:
            os.mkfifo(path)
        else:
            os.symlink("/dev/zero", path)
        return len(data)

    for sample in reader.samples():  # loads what is only loaded when it is needed
        reader.read(sample.seal(sample.data) if sample.seal else sample.data)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    signal.alarm(20)
    try:
        for _ in range(2):
            if reader.lenient:
                reader.read(MARK)
            else:
                with pytest.raises(FxpartError):
                    reader.read(MARK)
    finally:
        signal.alarm(0)
        for path in placed:
            path.unlink(missing_ok=True)
    assert len(placed) >= 2


def strings(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of all texts in plain data."""
    if isinstance(value, str):
        return [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [found for key, inner in items for found in strings(inner, (*path, key))]


def scripts(page: str) -> list[str]:
    """The scripts of a page."""
    return re.findall(r"<script.*?</script>", page, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("word", [w for w in words(Path("x")) if "<" in w or '"' in w])
def test_a_report_shows_markup_as_text(word: str) -> None:
    """Each text of a plan in turn is markup; the page has the elements that it had before."""
    plain = msgspec.to_builtins(sample_plans.plan(2, 2))
    own = scripts(report_html(sample_plans.plan(2, 2)))
    assert len(own) == 1
    shown = 0
    for path in strings(plain):
        changed = json.loads(json.dumps(plain))
        held = changed
        for key in path[:-1]:
            held = held[key]
        held[path[-1]] = word
        try:
            text = report_html(msgspec.convert(changed, Plan))
        except (msgspec.ValidationError, KeyError, ValueError):
            continue  # no free text: a name of a schedule, a digest
        shown += 1
        page = Page(text)
        names = {name for name, _ in page.tags}
        assert not names & {"img", "iframe", "object", "embed", "a", "link", "b"}
        assert scripts(text) == own  # the page's own
        assert sum(name == "script" for name, _ in page.tags) == 1
        assert not any(key.startswith("on") for _, held in page.tags for key in held)
    assert shown >= 10
