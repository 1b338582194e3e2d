"""The order of a step's computations, searched: for given stage times, links and memory.

:func:`fxpart.solver.order.search.search_schedule` is the entrance. problem has the numbers, jobs
the one definition of when everything happens, listing and descent find good orders, bounds and
order_ilp prove how good they are.
"""
