"""The host process: CPU affinity and heap."""
