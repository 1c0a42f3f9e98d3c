"""What jobs are made of: steps that an engine runs, rows between them, tables as results."""
