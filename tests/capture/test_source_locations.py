"""Places in the user's code, as messages name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpart.capture.source_locations import shorten_path


def test_paths_without_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(tmp_path)
    assert shorten_path(str(tmp_path / "models" / "net.py")) == "models/net.py"
    assert shorten_path("/opt/lib/site-packages/timm/layers.py") == "timm/layers.py"
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shorten_path(str(tmp_path / "models" / "net.py")) == "net.py"
