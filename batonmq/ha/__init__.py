"""Replicates the commit log from the master to its slaves, and decides how far it is confirmed. The
cores (`sync_state`, `follower`, `master_core`, `slave_core`, `received_log`) take events and
`now_ms` and return frozen effects, which the shells carry out. `service` is the interface for the
broker. The wire is RocketMQ's AutoSwitch protocol. `java_peer` has the differences with a Java
broker; `classic` replicates without controllers. `links`, `shells`, `config` serve both modes."""
