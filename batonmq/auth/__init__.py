"""RocketMQ's ACL: who signed a request, whether that user may, and the audit log."""
