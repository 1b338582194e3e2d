"""Code generation: from an assigned graph to readable Python modules, one per stage.

Import from the submodules. The submodules that write stage modules need sympy and the passes; those
that load them do not, so that a restarted rank imports little.
"""
