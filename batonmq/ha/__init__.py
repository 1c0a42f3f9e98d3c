"""Replicates the commit log from the master to its slaves and decides how far it is confirmed. The
cores (`sync_state`, `follower`, `master_core`, `slave_core`, `received_log`) decide: events and
`now_ms` in, frozen effects out. The shells carry the effects out; `service` is what a broker holds.
The wire is RocketMQ's AutoSwitch protocol. `java_peer` says what differs with a Java broker,
`classic` replicates without controllers. `links`, `shells`, `ports`, `config` serve both modes."""
