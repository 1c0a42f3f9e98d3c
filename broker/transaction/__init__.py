"""Half messages, their outcome, and the check of producers that went silent."""
