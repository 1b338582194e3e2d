"""Solvers: numbers in, choice and bound out. Plain Python, NumPy and OR-Tools, no torch."""
