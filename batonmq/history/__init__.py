"""The failover history: events, their files and messages, and the fold that makes stories."""
