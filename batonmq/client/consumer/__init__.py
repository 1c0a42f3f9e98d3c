"""Reading messages: `PushConsumer` calls a listener, `PullConsumer` is asked for messages."""
