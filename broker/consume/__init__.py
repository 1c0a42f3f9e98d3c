"""Requests of consumers (heartbeats, pulls, locks, offsets), and administration of their groups."""
