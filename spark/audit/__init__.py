"""The audit of messages: replicas against each other, and against acknowledged sends."""
