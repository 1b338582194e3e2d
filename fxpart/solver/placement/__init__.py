"""Sharding strategies of operations on one mesh: an assignment problem and its solvers."""
