"""``fxpart ckpt convert``, as a person and as a program would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exchange_sources import MORE, OUTLINES, Numbers, checkpoint

from fxpart.checkpoint.exchange import conversion
from fxpart.cli import run
from fxpart.cli.ckpt_convert import FORMATS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "run" / "checkpoints", Numbers(OUTLINES | MORE), {})
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    status = run(["ckpt", "convert", *map(str, arguments), "--json"])
    found = capsys.readouterr()
    return status, json.loads(found.out), found.err


def test_formats_are_those_that_there_are() -> None:
    assert conversion.FORMATS == FORMATS


def test_a_run_there_and_back(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, there, _ = told(capsys, root / "run", root / "all.safetensors", "--to", "whole")
    assert status == 0 and there["from"] == "fxpart" and there["left_out"] == []
    assert there["tensors"] == len(OUTLINES | MORE)
    status, back, _ = told(capsys, root / "all.safetensors", root / "back", "--to", "fxpart")
    assert status == 0 and back["from"] == "whole"
    assert Path(back["path"]).name == "step-0000000120"


def test_what_is_left_out_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "convert", str(root / "run"), str(root / "hf"), "--to", "hf"]) == 0
    found = capsys.readouterr()
    assert "5 tensors" in found.out
    assert "cannot represent 6 tensors of buffer, model, optimizer, random" in found.err
    _, only, _ = told(capsys, root / "run", root / "b", "--to", "whole", "--model-only")
    assert all(not key.startswith("model/") for key in only["left_out"]) and only["left_out"]


def test_a_strategy_and_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"process_shape": [3], "process_group": [0, 1, 2], "dims_mapping": [0, -1]}
    (root / "s.json").write_text(json.dumps({"h.0.weight": cut}))
    given = ["--to", "paddle", "--strategy", root / "s.json"]
    assert told(capsys, root / "run", root / "paddle", *given)[0] == 0
    assert len(list((root / "paddle").glob("*.pdattr.json"))) == 3
    (root / "s.json").write_text(json.dumps({"h.0.weight": cut | {"dims_mapping": [-1, 0]}}))
    status, fault, _ = told(capsys, root / "run", root / "other", *given)
    assert status == 2 and "cannot be sharded evenly into [1, 3]" in fault["error"][0]["why"]
    plain = ["--model-prefix", "", "--optimizer-prefix", ""]
    told(capsys, root / "run", root / "dcp", "--to", "dcp", *plain)
    index = json.loads((root / "dcp" / "model.safetensors.index.json").read_text())
    assert "h.0.weight" in index["weight_map"]


@pytest.mark.slow
def test_without_torch(root: Path) -> None:
    arguments = ["ckpt", "convert", str(root / "run"), str(root / "x"), "--to", "dcp"]
    code = (
        f"import sys\nfrom fxpart.cli import run\nstatus = run({arguments})\n"
        "assert status == 0 and not {'torch', 'safetensors', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
