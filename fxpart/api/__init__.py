"""The public API: compile a model, propose a plan, and the compiled program."""

from fxpart.api.entry_points import PlanProposal, compile, propose
from fxpart.api.program import Program

__all__ = ["PlanProposal", "Program", "compile", "propose"]
