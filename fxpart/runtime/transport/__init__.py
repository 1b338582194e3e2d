"""How ranks reach each other: process groups, shared memory, control messages."""
