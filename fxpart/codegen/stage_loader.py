"""Load a stage module from its source text."""

from __future__ import annotations

import hashlib
import linecache
import re
from typing import Any

import torch

from fxpart.program.spec import StageSpec


def load_stage(source: str, spec: StageSpec, device: str | torch.device = "cpu") -> torch.nn.Module:
    """Return the module of a stage, with its state on the meta device.

    source: text of :func:`fxpart.codegen.module_emitter`, or of a file with a verified digest; it
    is executed. The text is registered with ``linecache``, so tracebacks and debuggers show its
    lines. device: where forward creates new tensors.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<fxpart stage {spec.index} {digest}>"
    # linecache keeps an entry without a modification time and does not look for a file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fxpart_stage_{spec.index}_{digest}"}
    exec(compile(source, filename, "exec"), namespace)
    # A replica has the source text and class name of the original stage.
    (made,) = (value for name, value in namespace.items() if re.fullmatch("Stage[0-9]+", name))
    module = made(device)
    assert isinstance(module, torch.nn.Module)
    module.__dict__["INDEX"] = spec.index  # the replica's own index
    return module
