"""The public API: compile a model, and the compiled program."""

from fxpart.api.entry_points import compile, propose
from fxpart.api.program import Program

__all__ = ["Program", "compile", "propose"]
