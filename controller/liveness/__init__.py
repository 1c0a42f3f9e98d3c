"""Which brokers are alive, as this node sees it first-hand, and which groups need an election.

All of it is pure. `controller/watch` is the shell around it: it holds the open gRPC sessions and
sends the answers that grant a master its lease.
"""
