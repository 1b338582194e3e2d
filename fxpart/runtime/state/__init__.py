"""Parameters and buffers of a trainer, and how they leave it."""
