"""Key-values in namespaces, kept in one JSON file (`{"configTable":{ns:{key:value}}}`).

A change is durable before the reply; without a path nothing is kept. Origin: Java
`KVConfigManager`.
"""

from __future__ import annotations

import json
from pathlib import Path

from batonmq.process.durable_file import load_with_backup, replace_file

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""Namespace of the queue layouts of globally ordered topics: `broker-a:4;broker-b:4`."""


class KVConfig:
    """`path` None keeps the values in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}

    def load(self) -> None:
        """Raises UnreadableFileError (a ValueError) if the file is there but unusable."""
        if self._path is None:
            return
        loaded = load_with_backup(self._path, _parse)
        self._table = loaded.value if loaded is not None else {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy of all pairs, None if the namespace does not exist."""
        pairs = self._table.get(namespace)
        return dict(pairs) if pairs is not None else None

    def put(self, namespace: str, key: str, value: str) -> None:
        self._table.setdefault(namespace, {})[key] = value
        self._persist()

    def delete(self, namespace: str, key: str) -> None:
        """Does nothing for an unknown key."""
        if self._table.get(namespace, {}).pop(key, None) is not None:
            self._persist()

    def _persist(self) -> None:
        if self._path is not None:
            text = json.dumps({"configTable": self._table}, ensure_ascii=False)
            replace_file(self._path, text.encode(), keep_previous=True)


def _parse(data: bytes) -> dict[str, dict[str, str]]:
    value = json.loads(data)
    table = value.get("configTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise ValueError("no configTable in it")
    return {
        str(namespace): {str(key): str(item) for key, item in pairs.items()}
        for namespace, pairs in table.items()
    }
