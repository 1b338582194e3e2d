"""Parameters and buffers of a trainer, and their export."""
