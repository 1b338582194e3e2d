"""Between a trainer and the files of :mod:`fxpart.checkpoint`: taken, saved, and given back."""
