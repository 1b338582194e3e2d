"""What others' texts can be read: one line for each format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxpart.bounded import read_bytes
from fxpart.cluster_io import nccl_tests, paddle, slurm, topology
from fxpart.cluster_io.facts import MAX_TEXT, Facts, Found, fault


@dataclass(frozen=True)
class Importer:
    """One format.

    says: what its texts are, for help. looks_like: whether a text may be one. read: the cluster of
    a text and of what a person adds; raises FXP407, and no other error, for any text.
    """

    says: str
    looks_like: Callable[[str], bool]
    read: Callable[[str, Facts], Found]


# In the order in which they are asked whether a text is theirs, the surest first.
IMPORTERS = {
    "paddle": Importer("PaddlePaddle's cluster JSON", paddle.looks_like, paddle.read),
    "topo": Importer("what nvidia-smi topo -m prints", topology.looks_like, topology.read),
    "nccl-tests": Importer(
        "what all_reduce_perf and the like print, or write with -J",
        nccl_tests.looks_like,
        nccl_tests.read,
    ),
    "slurm": Importer(
        "a node list such as node[01-04], or env | grep SLURM", slurm.looks_like, slurm.read
    ),
}
AUTO = "auto"


def recognise(text: str) -> str:
    """The format of a text; FXP407 where it is none that is known."""
    found = next((name for name, each in IMPORTERS.items() if each.looks_like(text)), None)
    if found is None:
        known = "; ".join(f"{name}: {each.says}" for name, each in IMPORTERS.items())
        raise fault("the text", "it is in no format that is known", f"give --format.\n{known}")
    return found


def read(text: str, form: str, facts: Facts) -> Found:
    """The cluster of a text in one of the formats, or "auto"; FXP407."""
    return IMPORTERS[recognise(text) if form == AUTO else form].read(text, facts)


def load(path: Path, form: str, facts: Facts) -> Found:
    """The cluster of a file; FXP401 where it cannot be read, FXP407 where it is wrong."""
    from fxpart.errors import error

    try:
        text = read_bytes(path, MAX_TEXT).decode("utf-8-sig")
    except OSError as why:
        fix = "give the path of a readable file"
        raise error("FXP401", where=str(path), why=why.strerror or str(why), fix=fix) from why
    except UnicodeDecodeError as why:
        raise fault(str(path), f"it is no text: byte {why.start} is no UTF-8") from why
    return read(text, form, facts)
