"""Master-slave replication as RocketMQ had it before controllers: `wire`, `master_core`,
`slave_core`, `service`. There are no epochs and no elections: the configuration says who is
master."""
