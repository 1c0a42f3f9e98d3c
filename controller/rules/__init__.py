"""The replicated state and its rules: pure functions of the commands in the log.

They use no clock and no socket, and do not decide who is alive: a command carries all that its rule
may look at. Remarks and reasons are part of the state, which all nodes must compute alike: a change
of such a text is a change of the rules (`RULES_VERSION`).
"""
