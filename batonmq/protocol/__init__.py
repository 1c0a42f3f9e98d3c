"""The field's vocabulary, free of I/O: codes, errors, message and record codec, ids, JSON bodies.

Everything here is a value or a function from bytes to values and back; no clock is read, no socket
or file is opened, and no other package of the project is known.
"""

__all__: list[str] = []
