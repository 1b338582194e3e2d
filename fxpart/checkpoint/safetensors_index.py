"""Folders of safetensors files, as Hugging Face's: names of the files, and the index of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxpart.files import from_json

INDEX = "model.safetensors.index.json"


def split_into_files(
    sizes: Mapping[str, int], largest: int, *, numbered: bool = False
) -> dict[str, list[str]]:
    """Return the tensors of each file, in order; a tensor above the limit has its own file.

    sizes: bytes of each tensor. largest: bytes of a file. numbered: also if there is one file.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, added in sizes.items():
        if groups[-1] and size + added > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += added
    if len(groups) == 1 and not numbered:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def format_index(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> str:
    """Return the text of an index. files: the tensors of each."""
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def parse_index(data: bytes | str) -> dict[str, str]:
    """Return the file of each tensor; ValueError if the text is no index."""
    try:
        found: Any = from_json(data)["weight_map"]
        outside = [name for name in set(found.values()) if Path(name).name != name]
        if not outside:
            return dict(found)
    except (KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise ValueError(repr(cause)[:200]) from cause
    raise ValueError("it names a file outside the folder")
