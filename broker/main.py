"""`python -m batonmq.broker.main -c FILE`: one broker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot run (port in use, locked folder, damage), 2
for an unreadable configuration.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from batonmq.runtime.extras import need_server

if __name__ == "__main__":
    need_server("broker")  # before the imports that would fail

import msgspec

from batonmq.auth.config import AuthConfig
from batonmq.broker.broker_endpoint import BrokerEndpoint
from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.java_keys import JAVA_KEYS
from batonmq.ha.config import HAConfig
from batonmq.runtime import read_faults
from batonmq.runtime.metrics import MetricsConfig
from batonmq.runtime.server_main import ServerMain, keep_what_is_loaded, run_server, started
from batonmq.runtime.tls import TlsConfig
from batonmq.store.config import StoreConfig
from batonmq.store.suspicion import fault_note

if TYPE_CHECKING:
    from batonmq.broker.metrics import BrokerMetrics
    from batonmq.broker.service import BrokerService

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "broker": BrokerConfig,
    "store": StoreConfig,
    "ha": HAConfig,
    "replicas": ReplicasConfig,
    "metrics": MetricsConfig,
    "tls": TlsConfig,
    "auth": AuthConfig,
}


# After fdatasync the flush thread waits until the loop releases the interpreter: by default up to
# 5 ms, and every SYNC_FLUSH ack would wait as long.
SWITCH_INTERVAL_S = 0.0005


def _load() -> tuple[type[BrokerService], type[BrokerMetrics]]:
    """Imports the rest of the code, in a thread, while the loop serves the endpoint."""
    from batonmq.broker.metrics import BrokerMetrics
    from batonmq.broker.service import BrokerService

    keep_what_is_loaded()
    return BrokerService, BrokerMetrics


async def serve(main: ServerMain) -> None:
    """Runs a broker until SIGTERM, SIGINT or a fatal error."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sections = main.sections
    config = BrokerSections(
        sections["broker"],
        sections["store"],
        sections["ha"],
        sections["replicas"],
        main.tls,
        sections["auth"],
    )
    read_faults.watch(fault_note(config.store.root))
    endpoint = BrokerEndpoint(config)
    await endpoint.listen()
    main.serving()
    broker_service, broker_metrics = await asyncio.to_thread(_load)
    endpoint.laps.end("code")
    service = broker_service(config, main.fail, endpoint)
    main.metrics.show(broker_metrics(service))
    if not await started(service.start(), main.stopped()):
        return
    try:
        await main.stopped()
    finally:
        await service.close()


def main() -> int:
    return run_server("broker", SECTIONS, serve, JAVA_KEYS)


if __name__ == "__main__":
    sys.exit(main())
