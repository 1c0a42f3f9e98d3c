"""RocketMQ's protocol without I/O: codes, errors, message and record codec, ids, JSON bodies. It
reads no clock, opens no socket or file, and imports no other package of the project."""

__all__: list[str] = []
