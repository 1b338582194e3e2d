"""Schedules: which rank does what, in which order. Plain Python, no torch.

A name becomes a schedule that may be run by ``make.make``: builders (which stage computes what),
place (stages onto ranks), lower (transfers), verify (proof). dependence says what needs what, for
all of them and for the executor; simulate, steps and draw show a schedule in time (crowd: ranks
that share a host; sharing: the engine for them; window: the runtime's limits); text and torch_csv
write it down, files reads either.
"""
