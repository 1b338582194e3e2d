"""Search for the order of a step's computations, for given stage times, links and memory.

:func:`fxpart.solver.order.search.search_schedule` is the entry point. `problem` has the numbers,
`jobs` the definition of all start and end times. `list_scheduler` and `descent` find good orders,
`bounds` and `order_ilp` prove how good they are.
"""
