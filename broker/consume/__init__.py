"""What consumers ask: heartbeats, pulls, locks, offsets; what an operator asks of their groups."""
