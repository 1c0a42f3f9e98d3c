"""The audit of messages: replicas against each other, and against what producers were told."""
