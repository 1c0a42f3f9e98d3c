"""Ships the commit log from a group's master to its slaves, and knows how far it is confirmed.

`wire` and `protocol` speak RocketMQ's AutoSwitchHA stream byte for byte; `sync_state`,
`master_core` and `slave_core` decide (events and `now_ms` in, frozen effects out) and touch neither
socket nor file; `service` is the asyncio shell around them that a broker holds. Which member's ack
counts, when confirmOffset moves and what may be cut follows SAFETY.md R1, R9, R11, R13-R15, R18 and
R21-R23.
"""
