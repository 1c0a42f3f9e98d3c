"""The role of one broker: registration, sessions with all controllers, role changes, the lease.

`state` takes events and returns effects, with `role`, `alter` and `controllers`; `switch` does so
for a planned switch. `service` performs the effects: a `link` speaks with the controllers,
`role_runner` calls the broker by the protocols in `link`, `identity` keeps the durable facts. There
are two links: `grpc_link` (with `session`) for our controllers, `remoting_link` (with
`remoting_calls`) for RocketMQ's. Origin: Java
`org.apache.rocketmq.broker.controller.ReplicasManager`, with the sessions, the lease and the
incarnation added (SAFETY rules R2, R3, R5, R11, R12, R20, R36).
"""
