"""One broker's role: registration, sessions with every controller, role changes, the lease.

`state.py` decides (events in, effects out), `session.py` speaks gRPC with one controller,
`identity.py` keeps the durable facts, `service.py` performs the effects and calls the broker.
Origin: Java `org.apache.rocketmq.broker.controller.ReplicasManager`, with the sessions, the lease
and the incarnation added (SAFETY rules R2, R3, R5, R11, R12, R20, R36).
"""

from replicas_manager.actions import BrokerActions, LogFacts, Proposal

__all__ = ["BrokerActions", "LogFacts", "Proposal"]
