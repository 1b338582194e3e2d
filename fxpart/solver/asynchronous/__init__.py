"""Cuts for asynchronous 1F1B, which runs without flushes."""
