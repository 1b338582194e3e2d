"""An assigned graph turned into readable Python modules, one for each stage, and their files.

Import what is needed from the modules themselves: those that write modules need sympy and the
passes, those that load them do not, and a rank that starts again does no more than load.
"""
