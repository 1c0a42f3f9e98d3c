"""Consumers: `PushConsumer` calls a listener; a program asks `PullConsumer` for messages."""
