"""Groups of copies on devices of several kinds: which blocks, which devices, whose turn when."""
