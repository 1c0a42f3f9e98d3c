"""POP: the broker tracks which consumer has which message, and for how long."""
