"""Device assignment: the devices of each stage on the real links, and the device order."""
