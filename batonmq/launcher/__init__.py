"""The launcher `batonmq`: single processes, a local cluster (`up`), and the demonstration (`demo`).

It starts the servers by the names of their modules and imports none of them; with `python -P`, so
that no file of the working folder replaces a module.
"""
