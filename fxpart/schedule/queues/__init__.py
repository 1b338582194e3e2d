"""Microbatch queues of replicated stages: dynamic routing to whichever replica is free.

Plain Python without processes and torch; :mod:`fxpart.runtime.queues` executes it.
"""
