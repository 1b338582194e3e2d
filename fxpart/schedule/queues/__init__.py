"""Microbatches that wait in queues for whichever copy of a stage is free: who does what next.

Without processes, and without torch: :mod:`fxpart.runtime.queues` executes it.
"""
