"""Plan a captured model on a cluster: candidate search, plan selection, certificates."""
