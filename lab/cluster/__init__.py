"""What faults, bench and the tests of real processes share. The product never imports it.

From outside, without an import of batonmq: `frames` and `connection` (raw requests), `acks`,
`probe` and `load` (a process that writes to every broker, and its handle), `readback`, `checks`
(pure: what must hold of acknowledged writes), `writer` (threads of numbered writes), `processes`
(children, ports, waiting).

Clusters: `cluster` is what all of them share. Backends: `up` (`batonmq up` as a child), `held` with
`node_process` (processes that the lab holds itself, each in a network namespace of `network`, built
by `network_commands`), `compose` (containers), `mixed` and `classic` (with Java's servers).

Through the product's own code: `stores` (logs of stopped replicas), `queues` (what a topic holds),
`client_writer`, `mqctl`. Foreign programs: `java` (the stock jars and programs), `spark_submit`.
"""
