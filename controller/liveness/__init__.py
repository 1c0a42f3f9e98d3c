"""Which brokers are alive, as this node sees it first-hand, and which groups need an election.

`core`, `broker_sessions` and `events` are pure. `watch` is the shell around them: it holds the open
gRPC sessions and sends the answers that grant a master its lease.
"""
