"""The admin command line: RocketMQ's command names for people and for scripts.

`main` is the entry point and the list of commands, `commands` their families, `target` finds the
cluster, `context` opens the client, `output` prints tables or JSON. Nothing heavier than click is
imported before a command runs: `mqctl --help` must answer at once.
"""
