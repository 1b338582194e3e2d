"""Registry of the formats that can be imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxpart.cluster.importers import nccl_tests, nvidia_topology, paddle, slurm
from fxpart.cluster.importers.source_facts import (
    MAX_TEXT,
    ImportedCluster,
    ImportOptions,
    make_import_error,
)
from fxpart.files import read_bytes


@dataclass(frozen=True)
class ClusterImporter:
    """One importable format.

    summary: description for help texts. looks_like: returns whether a text may have this format.
    read: returns the cluster of a text with the user's options; raises only FXP407 for any text.
    """

    summary: str
    looks_like: Callable[[str], bool]
    read: Callable[[str, ImportOptions], ImportedCluster]


# In order of detection, the most specific format first.
IMPORTERS = {
    "paddle": ClusterImporter("PaddlePaddle's cluster JSON", paddle.looks_like, paddle.read),
    "topo": ClusterImporter(
        "output of nvidia-smi topo -m", nvidia_topology.looks_like, nvidia_topology.read
    ),
    "nccl-tests": ClusterImporter(
        "output of all_reduce_perf and similar programs, as a table or as JSON (-J)",
        nccl_tests.looks_like,
        nccl_tests.read,
    ),
    "slurm": ClusterImporter(
        "a node list such as node[01-04], or the output of env | grep SLURM",
        slurm.looks_like,
        slurm.read,
    ),
}
AUTO = "auto"


def detect_format(text: str) -> str:
    """Return the format of a text; FXP407 if it is unknown."""
    found = next((name for name, each in IMPORTERS.items() if each.looks_like(text)), None)
    if found is None:
        known = "; ".join(f"{name}: {each.summary}" for name, each in IMPORTERS.items())
        raise make_import_error("the text", "its format is unknown", f"pass --format.\n{known}")
    return found


def read(text: str, form: str, facts: ImportOptions) -> ImportedCluster:
    """Return the cluster of a text in one of the formats, or "auto"; FXP407 if it is not valid."""
    return IMPORTERS[detect_format(text) if form == AUTO else form].read(text, facts)


def load(path: Path, form: str, facts: ImportOptions) -> ImportedCluster:
    """Return the cluster of a file; FXP401 if it cannot be read, FXP407 if it is not valid."""
    from fxpart.errors import error

    try:
        text = read_bytes(path, MAX_TEXT).decode("utf-8-sig")
    except OSError as why:
        fix = "give the path of a readable file"
        raise error("FXP401", where=str(path), why=why.strerror or str(why), fix=fix) from why
    except UnicodeDecodeError as why:
        raise make_import_error(
            str(path), f"it is not UTF-8 text: byte {why.start} is not valid"
        ) from why
    return read(text, form, facts)
