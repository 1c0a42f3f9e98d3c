"""The launcher `batonmq`: single processes, a local cluster (`up`), and the demonstration (`demo`).

It starts the servers as processes by module name and imports none of them.
"""
