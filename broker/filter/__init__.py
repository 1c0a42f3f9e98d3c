"""Which messages a subscription wants: SQL92 expressions, compiled and kept."""
