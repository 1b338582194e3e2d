"""Checkpoints in other tools' formats, and theirs as ours; nothing here knows torch.

A format is a module with a class that reads it (a ``Source``) and a function that writes it;
:mod:`~fxpart.checkpoint.exchange.conversion` knows them all. One tensor is in memory at a time.
Nothing that is pickled is read or written.
"""
