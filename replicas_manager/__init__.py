"""One broker's role: registration, sessions with every controller, role changes, the lease.

`state` decides (events in, effects out) with `role`, `alter` and `controllers`; `switch` decides a
planned switch. `service` performs the effects: a `link` speaks with the controllers, `role_runner`
calls the broker through the protocols of `link`, `identity` keeps the durable facts. Of the two
links, `grpc_link` (with `session`) is for our controllers, `remoting_link` (with
`remoting_requests` and `remoting_calls`) for RocketMQ's.
Origin: Java `org.apache.rocketmq.broker.controller.ReplicasManager`, with the sessions, the lease
and the incarnation added (SAFETY rules R2, R3, R5, R11, R12, R20, R36).
"""
