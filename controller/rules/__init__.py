"""The replicated state and its rules: pure functions of the commands in the log.

They use no clock and no socket, and do not decide who is alive: a command carries all that its rule
may look at. Remarks and reasons are part of the state, and all nodes must compute the same state.
So who changes such a text changes the rules (`RULES_VERSION`).
"""
