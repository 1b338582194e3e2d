"""Other engines: stages for torch.distributed.pipelining, and configurations of their own."""
