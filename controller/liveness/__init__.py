"""Which brokers are alive, as this node sees it first-hand, and which groups need an election.

`core`, `broker_sessions` and `events` are pure. `watch` is the shell around them, `streams` holds
the open gRPC streams, `heartbeat_answers` sends the answers that grant a master its lease.
"""
