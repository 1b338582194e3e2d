"""Capture: an unmodified nn.Module becomes a torch.fx graph with named state and inputs."""
