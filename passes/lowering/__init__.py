"""What the pass ``lower`` is made of: who needs what, the steps between placements, local sizes."""
