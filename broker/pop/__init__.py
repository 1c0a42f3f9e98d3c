"""POP: the broker keeps who has which message, and for how long."""
