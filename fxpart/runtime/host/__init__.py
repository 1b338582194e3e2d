"""Host settings of the process: CPU affinity and heap."""
