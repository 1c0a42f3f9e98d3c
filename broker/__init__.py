"""The broker process: processors behind the remoting endpoint, the write path, and the role.

Packages, the lower ones last: `pop`, `send`, `schedule`, `replication`, `transaction`, `consume`,
`filter`, `write`, `tables`. The process itself is in the root.

A processor takes a request and returns its reply; `register` names its codes, and the remoting
server finds it by them. A new code goes into the processor of its kind:

| processor | codes |
|---|---|
| `send.send_processor` | 10, 310, 320 (raw: frame in, frame out) |
| `send.reply_processor` | answers to requests 324, 325; 326 to the requester |
| `send.send_back` | send-backs of consumers 36 |
| `consume.pull_processor` | 11, 361 (raw) |
| `consume.query_processor` | offsets 14, 15, 29 to 32; messages by key 12, by id 33; units 321 |
| `consume.client_processor` | heartbeats 34, 35; members 38, 60003; filters 46; notice 40 |
| `consume.lock_processor` | queue locks of orderly groups 41, 42 |
| `pop.pop_processor` | POP 200050; 200052, 200054, 200055 |
| `pop.ack_processor` | acks 200051, 200151; another invisible time 200053 |
| `pop.assignment` | assignments of queues 400; pull or POP 401 |
| `admin_processor` | topics 17, 18, 215, 305, 316, 351; groups 200, 207, 225, 352, 353 |
| `settings_processor` | settings 25, 26; who is connected without TLS 60010 |
| `user_processor` | users and policies 3001 to 3010; 60006, 60008, 60009 |
| `admin_processor` | expiry 306, 329; status 28, 315, 907, 1007; repair 60001; read mode 2004 |
| `admin_processor` | features that are off: RocksDB 354, 355, 200056; cold reads 2001 to 2003 |
| `consume.group_admin` | positions 202, 208, 300, 303, 317, 343; offsets 222, 223, 314 |
| `consume.group_admin` | members 307, 309 |
| `consume.connection_processor` | connected clients 203, 204, 328, 345 |
| `transaction.transaction_service` | ends of transactions 37; checks restarted 323 |
| `schedule` | recalls of timer messages 370; their metrics 61 |
| `tables.slave_sync` | tables for slaves 21, 43, 45, 60, 201, 402, 60002 |
| `replication.classic` | outside controller mode 905, 906, 60004 |
| `replication.replication` | a hint that the role changed 1008; 908 |
| `name_server_registrar` | a master asks to be registered 60011 |
| `relay` | a stopping master says how many requests it took 60005 |

On a replica that is not master, `relay` passes on requests that only the master may handle. Before
the store is open, `broker_endpoint` owns the ports.

All code that stores messages uses `write.write_path.WritePath`: gate, turn buffer, pending acks.
`replication.controlled` and `replication.classic` are the two modes; a reader of one need not read
the other. `service.BrokerService` builds the process out of its parts, `batonmq.broker.main` runs
it alone.
"""
