"""``fxpart env``: versions and devices, for a bug report."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import click

from fxpart._version import __version__
from fxpart.cli import output
from fxpart.cli.options import json_option

PACKAGES = ("torch", "transformers", "timm", "numpy", "sympy", "ortools", "msgspec", "safetensors")


@click.command()
@json_option
def command(as_json: bool) -> int:
    """Show the versions, devices and transports that fxpart finds here."""
    found: dict[str, str] = {
        "fxpart": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        **{name: _version(name) for name in PACKAGES},
        **_torch(),
    }
    if as_json:
        output.data(found)
        return 0
    width = max(map(len, found))
    for key, value in found.items():
        output.text(f"{key:<{width}}  {value}")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> dict[str, str]:
    """Return the devices and transports of torch on this machine."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as why:
        return {"torch loads": f"no: {why}"}
    backends = ("gloo", "nccl", "mpi")
    usable = [b for b in backends if dist.is_available() and dist.is_backend_available(b)]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    from fxpart.compat import compiler_fault

    kind = "cuda" if gpus else "cpu"
    return {
        "compiled stages": compiler_fault("inductor", kind) or "yes",
        "pinning of ranks": "yes" if hasattr(os, "sched_setaffinity") else "not on this system",
        "threads of torch": str(torch.get_num_threads()),
        "transports": ", ".join(usable) or "none",
        "gpus": ", ".join(gpus) or "none",
    }
