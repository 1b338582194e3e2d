"""Parts of the passes ``annotate`` and ``propagate``."""
