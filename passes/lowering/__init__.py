"""Parts of the pass ``lower``: placement requirements, reshard steps, local sizes."""
