"""Communication between ranks: process groups, shared memory, control messages."""
