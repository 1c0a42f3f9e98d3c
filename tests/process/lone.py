"""A broker of which nobody runs the controllers, so it stays without a role."""

import sys
from pathlib import Path

import yaml

from lab.cluster.processes import free_base_port

SEGMENT = 1 << 20


def lone_broker(folder: Path, **store: object) -> list[str]:
    """The command that starts one in that folder. `store`: more keys of its section."""
    port = free_base_port(1) + 1035
    config = {
        "broker": {"brokerName": "broker-a", "listenPort": port, "bindAddress": "127.0.0.1"},
        "store": {
            "storePathRootDir": str(folder / "store"),
            "haListenPort": port + 1,
            "mappedFileSizeCommitLog": SEGMENT,
            **store,
        },
        "replicas": {"controllerAddr": "127.0.0.1:1"},
    }
    file = folder / "broker.yaml"
    file.write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "batonmq.broker.main", "-c", str(file)]
