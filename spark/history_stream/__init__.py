"""The failover history as it is published, from its topic into Parquet: `stream_history`."""
