"""From a checked message to its acknowledgement: hooks, append, what waits for confirmOffset."""
