"""Tensors in safetensors files, read one by one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fxpart.errors import FxpartError, Problem


class TensorFiles:
    """The tensors of one ``.safetensors`` file, or of all that lie in a folder.

    Only headers are read until a tensor is asked for. Raises FXP110 when there is no such file,
    when one is damaged, or when two files have a tensor of the same name.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers."""
        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise _fault(path, "the folder has no .safetensors file")
        self._files: dict[str, Any] = {}
        problems: list[Problem] = []
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt", device="cpu")
                names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as cause:
                problems.extend(_fault(file, f"it cannot be read: {cause}").problems)
                continue
            for name in names:
                if name in self._files:
                    problems.extend(_fault(file, f"{name} is in another file too").problems)
                self._files[name] = opened
        if problems:
            raise FxpartError(problems)

    def names(self) -> Collection[str]:
        """All names in all files."""
        return self._files.keys()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from the header."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A range of each dim of one tensor, on the CPU; nothing else of it is read."""
        if not slices:
            return self.read(name)
        tensor: torch.Tensor = self._files[name].get_slice(name)[slices]
        return tensor


def _fault(path: Path, why: str) -> FxpartError:
    fix = "give a .safetensors file, or a folder of them"
    return FxpartError(Problem("FXP110", path.name, why, fix))
