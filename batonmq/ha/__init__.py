"""Replicates the commit log from master to slaves, and decides how far it is confirmed.

The cores decide: events and `now_ms` in, frozen effects out, no socket and no file. `sync_state`
and `follower` know whose acks count, `master_core` what each slave is sent, `slave_core` and
`received_log` how a slave follows. The shells do what the effects say. `service` is what a broker
holds. `wire` and the cores speak RocketMQ's AutoSwitch protocol byte for byte; `links`,
`shells`, `ports` and `config` know no protocol.
Rules: SAFETY.md R1, R9, R11, R13-R15, R18 and R21-R23.
"""
