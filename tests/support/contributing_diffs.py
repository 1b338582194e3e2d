"""The diffs of CONTRIBUTING.md, and a copy of the source to which they are applied."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read_diffs(folder: str) -> list[str]:
    """Return the diffs of CONTRIBUTING.md that change a file below a folder."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    return [diff for diff in diffs if f"+++ b/{folder}" in diff]


def patched(diffs: list[str], folder: Path) -> Path:
    """Copy the product and what tests share to a folder, apply the diffs, and return the folder."""
    for name in ("fxpart", "passes", "costmodels", "tests/support"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for diff in diffs:
        apply = ["git", "apply", "--unidiff-zero", "-"]
        subprocess.run(apply, cwd=folder, input=diff, text=True, check=True, capture_output=True)
    return folder
