"""Write the notebooks of ``examples/notebooks/`` from the examples with cells.

python tests/support/notebooks.py

An example with cells has the percent format: ``# %%`` begins code, ``# %% [markdown]`` text. What
is before the first cell, the docstring, is left out. A cell with ``# In a notebook: CODE`` becomes
this code, as a notebook has no command line. Notebooks have no outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "notebooks"
_MARK = re.compile(r"(?m)^# %%(?: \[(markdown)\])?\n")
_NOTEBOOK = re.compile(r"(?m)^# In a notebook: (.+)$")


def list_examples() -> list[Path]:
    """Return the examples with cells."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if _MARK.search(path.read_text("utf-8"))]


def make_notebook(script: str) -> str:
    """Return the notebook of a script, as text of format 4.5."""
    _, *parts = _MARK.split(script)
    cells: list[dict[str, object]] = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        text = text.strip("\n")
        if kind == "markdown":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        elif found := _NOTEBOOK.search(text):
            text = found[1].replace("; ", "\n")
        text = text.replace("import argparse\n", "").replace("annotations\n\n\n", "annotations\n\n")
        cell: dict[str, object] = {
            "cell_type": kind or "code", "id": f"cell-{number}", "metadata": {},
            "source": text.splitlines(keepends=True),
        }  # fmt: skip
        cells.append(cell if kind else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    found = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for path in list_examples():
        text = make_notebook(path.read_text("utf-8"))
        (FOLDER / f"{path.stem}.ipynb").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
