"""Which devices each stage takes over the real links, and in which order unequal devices stand."""
