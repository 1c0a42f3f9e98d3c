"""Messages that become visible later: delay levels and timers."""
