"""The outputs in ``fxpart/docs/planning_for_a_cluster.md``: what its commands print.

    python tests/support/cluster_pages.py    (writes them into the page)

A block of a command starts with ``$``; what follows is what it prints, notes first. The host is
always the same there: two cores.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from fxpart import cli
from fxpart.cluster import host_detection, job_detection
from fxpart.cluster.importers import slurm
from fxpart.cluster.importers.source_facts import ImportOptions

PAGE = Path(__file__).parents[2] / "fxpart" / "docs" / "planning_for_a_cluster.md"
DATA = Path(__file__).parents[1] / "cluster" / "data"
FILES = {
    "topo.txt": "topo_dgx1_v100.txt",
    "all_reduce.txt": "nccl_all_reduce_8xa100.txt",
    "paddle.json": "paddle_2_machines.json",
}
BLOCK = re.compile(r"(```console\n\$ )([^\n]+)\n(.*?)(```)", re.DOTALL)
VARIABLES = re.compile(r"(SLURM\w+)=(\S+) ")


def filled(text: str) -> str:
    """The page with what each of its commands prints."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, source in FILES.items():
            shutil.copy(DATA / source, name)
        Path("nodes.txt").write_text("node[01-02]\n")
        facts = ImportOptions(device="t4", per_host=2)
        slurm.read("node[01-02]", facts).cluster.dump("job-without-network.toml")
        broken = (DATA / "topo_2xrtx4090.txt").read_text().replace("GPU1\tPHB", "GPU1\tQPI")
        Path("broken.txt").write_text(broken)
        made = BLOCK.sub(lambda m: f"{m[1]}{m[2]}\n{printed(m[2])}{m[4]}", text)
    return made


def printed(command: str) -> str:
    """What a command prints on a host of two cores: notes, then its answer."""
    given = dict(VARIABLES.findall(command))
    words = VARIABLES.sub("", command).split()
    assert words[0] == "fxpart", command
    plain = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    for name in ("RANK", "WORLD_SIZE"):
        plain.pop(name, None)
    answer, notes = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, plain | given, clear=True),
        mock.patch.object(host_detection, "cores", lambda: 2),
        mock.patch.object(job_detection, "cores", lambda: 2),
        mock.patch.object(host_detection, "memory", lambda: 16 << 30),
        mock.patch.object(host_detection, "flop_per_cycle", lambda: 32),
        mock.patch.object(job_detection, "find_gpus", list),
        redirect_stdout(answer),
        redirect_stderr(notes),
    ):
        cli.run(words[1:])
    return notes.getvalue() + answer.getvalue()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
