"""The commands by family. Each module imports click only; clients are imported by a command."""
