"""Sharding rules of ops: data in factor notation, one family a file.

``rule_of(node)`` gives the rule of a call in a graph, None where there is none (the op is then
replicated, and the plan says so). RULES has one line for each family's table.
"""

from __future__ import annotations

from .rule import PASS, REPLICATED, Layout, Rule, choices, layout, operands, parse

__all__ = ["PASS", "REPLICATED", "Layout", "Rule", "choices", "layout", "operands", "parse"]
