"""Pipeline schedules: which rank runs which action, in which order. Plain Python without torch.

``make.make`` turns a schedule name into a runnable schedule: build the order of computations
(`builders`), merge stages onto ranks (`rank_merge`), insert transfers (`lower`), and verify the
result (`verify`). `dependence` defines what each action requires; the verifier, the simulator and
the executor all use it. `simulate` and `multi_step` predict times, with CPU contention from
`host_contention` and `contention_times` and the runtime's transfer limits from `transfer_window`.
`text` and `torch_csv` serialize a schedule; `files` reads both formats.
"""
