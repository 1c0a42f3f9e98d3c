"""Master-slave replication as RocketMQ had it before controllers: `wire`, `master_core`,
`slave_core`, `service`. Without epochs and elections: the configuration says who is master."""
