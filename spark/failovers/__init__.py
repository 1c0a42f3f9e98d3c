"""Failovers as tables: from the histories of all controllers and the epoch files of all brokers."""
