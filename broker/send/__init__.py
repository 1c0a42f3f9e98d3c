"""Requests that store a message: sends, send-backs, replies."""
