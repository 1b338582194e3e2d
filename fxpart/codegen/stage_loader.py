"""A stage module made from its text, in memory."""

from __future__ import annotations

import hashlib
import linecache
import re
from typing import Any

import torch

from fxpart.program.spec import StageSpec


def load_stage(source: str, spec: StageSpec, device: str | torch.device = "cpu") -> torch.nn.Module:
    """The module of a stage, its state on the meta device until it is materialised.

    source: text that :func:`fxpart.codegen.module_emitter` wrote, or a file whose digest was
    verified; it is executed. The text is known to ``linecache``, so tracebacks and debuggers show
    its lines. device: where the forward makes new tensors.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<fxpart stage {spec.index} {digest}>"
    # An entry without a modification time stays: linecache does not look for a file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fxpart_stage_{spec.index}_{digest}"}
    exec(compile(source, filename, "exec"), namespace)
    # The text of a copy is that of the stage that it copies, under that one's name.
    (made,) = (value for name, value in namespace.items() if re.fullmatch("Stage[0-9]+", name))
    module = made(device)
    assert isinstance(module, torch.nn.Module)
    module.__dict__["INDEX"] = spec.index  # a copy's own
    return module
