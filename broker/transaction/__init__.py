"""Half messages, the end of their transactions, and the checks when a producer does not end one."""
