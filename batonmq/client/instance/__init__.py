"""The common parts of producers, consumers and admin: connections, routes, heartbeats, calls to
masters."""
