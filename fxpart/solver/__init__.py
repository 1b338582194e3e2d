"""Solvers: numeric problems in, choices and proven bounds out. Python, NumPy and OR-Tools, no
torch."""
