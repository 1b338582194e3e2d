"""What others' texts can be read: one line for each format."""

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
    """One format.

    says: what its texts are, for help. looks_like: whether a text may be one. read: the cluster of
    a text and of what a person adds; raises FXP407, and no other error, for any text.
    """

    says: str
    looks_like: Callable[[str], bool]
    read: Callable[[str, ImportOptions], ImportedCluster]


# In the order in which they are asked whether a text is theirs, the surest first.
IMPORTERS = {
    "paddle": ClusterImporter("PaddlePaddle's cluster JSON", paddle.looks_like, paddle.read),
    "topo": ClusterImporter(
        "what nvidia-smi topo -m prints", nvidia_topology.looks_like, nvidia_topology.read
    ),
    "nccl-tests": ClusterImporter(
        "what all_reduce_perf and the like print, or write with -J",
        nccl_tests.looks_like,
        nccl_tests.read,
    ),
    "slurm": ClusterImporter(
        "a node list such as node[01-04], or env | grep SLURM", slurm.looks_like, slurm.read
    ),
}
AUTO = "auto"


def recognise(text: str) -> str:
    """The format of a text; FXP407 where it is none that is known."""
    found = next((name for name, each in IMPORTERS.items() if each.looks_like(text)), None)
    if found is None:
        known = "; ".join(f"{name}: {each.says}" for name, each in IMPORTERS.items())
        raise make_import_error(
            "the text", "it is in no format that is known", f"give --format.\n{known}"
        )
    return found


def read(text: str, form: str, facts: ImportOptions) -> ImportedCluster:
    """The cluster of a text in one of the formats, or "auto"; FXP407."""
    return IMPORTERS[recognise(text) if form == AUTO else form].read(text, facts)


def load(path: Path, form: str, facts: ImportOptions) -> ImportedCluster:
    """The cluster of a file; FXP401 where it cannot be read, FXP407 where it is wrong."""
    from fxpart.errors import error

    try:
        text = read_bytes(path, MAX_TEXT).decode("utf-8-sig")
    except OSError as why:
        fix = "give the path of a readable file"
        raise error("FXP401", where=str(path), why=why.strerror or str(why), fix=fix) from why
    except UnicodeDecodeError as why:
        raise make_import_error(str(path), f"it is no text: byte {why.start} is no UTF-8") from why
    return read(text, form, facts)
