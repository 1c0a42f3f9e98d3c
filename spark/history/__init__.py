"""The failovers of controllers' histories as tables: one fold, on this machine or on Spark."""
