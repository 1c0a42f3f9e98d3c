"""Messages with a later delivery: delay levels and timers."""
