"""The tables beside the log: topics, groups, consumer offsets; how slaves follow the master's."""
