"""What producers, consumers and admin share: connections, routes, heartbeats, calls to masters."""
