"""Pickles of plain values only: what unpickles here can run nothing.

pysyncobj writes the commands of its log, and this package the messages between nodes, as pickles.
"""

import io
import pickle
from typing import Any

__all__ = ["restricted_loads"]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles str, bytes, numbers, None and containers of them, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # Protocol 2 writes bytes as _codecs.encode(text, "latin1"), and empty bytes as bytes().
        if (module_name, global_name) == ("_codecs", "encode"):
            return _encode_latin1
        if global_name == "bytes" and module_name in ("__builtin__", "builtins"):
            return bytes
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin1")


def restricted_loads(data: bytes) -> Any:
    """Reads a pickle of plain values. Raises UnpicklingError for a pickle that names code."""
    return _PlainUnpickler(io.BytesIO(data)).load()
