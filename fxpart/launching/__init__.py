"""Processes of one machine, started again when one of them ends."""
