"""Who asks: the signatures of RocketMQ's ACL. `signature` is pure."""
