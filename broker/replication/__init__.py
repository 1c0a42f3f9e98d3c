"""What a role does to this broker: with controllers, or classic by its configuration."""
