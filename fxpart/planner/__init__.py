"""From a captured model and a cluster to a plan: candidates, search, evidence."""
