"""The controller's service."""
