"""The broker process: processors behind the remoting endpoint, the write path, and the role.

A processor takes a request and returns its reply; `register` names its codes, and the remoting
server finds it by them. A new code goes into the processor of its kind:

| processor | codes |
|---|---|
| `send_processor` | 10, 310, 320 (raw: frame in, frame out) |
| `pull_processor` | 11 (raw) |
| `query_processor` | offsets 14, 15, 29 to 32; messages by key 12, by id 33 |
| `client_processor` | heartbeats and members of groups 34, 35, 38; notice 40 |
| `admin_processor` | topics and groups 17, 200, 215, 351; status 28, 907, 1007; repair 60001 |
| `slave_sync` | tables for slaves 21, 43, 45, 201 |
| `service` | 1008 |

On a member that is not master, `relay` takes what only the master may do and passes it on.

Whatever stores a message of its own uses `write_path.WritePath`: gate, turn buffer, pending acks.
`role_actions` is the only module that changes the role, `replication` joins HA and ReplicasManager,
`service.BrokerService` builds the process out of its parts, `batonmq.broker.main` runs it alone.
"""
