"""What the passes ``annotate`` and ``propagate`` are made of."""
