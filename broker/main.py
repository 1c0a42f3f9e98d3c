"""`python -m batonmq.broker.main -c FILE`: one broker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot run (a taken port, a locked folder, damage),
2 for a configuration that cannot be read.
"""

from __future__ import annotations

import sys

from batonmq.process.extras import need_server

if __name__ == "__main__":
    need_server("broker")  # before the imports that would fail

import msgspec

from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.service import BrokerService
from batonmq.ha.config import HAConfig
from batonmq.process import read_faults
from batonmq.process.server_main import ServerMain, run_server
from batonmq.store.bad_sector import fault_note
from batonmq.store.config import StoreConfig

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "broker": BrokerConfig,
    "store": StoreConfig,
    "ha": HAConfig,
    "replicas": ReplicasConfig,
}


# After fdatasync the flush thread waits until the loop releases the interpreter: by default up to
# 5 ms, and every SYNC_FLUSH ack would wait as long.
SWITCH_INTERVAL_S = 0.0005


async def serve(main: ServerMain) -> None:
    """Runs a broker until SIGTERM, SIGINT or a fatal error."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sections = main.sections
    config = BrokerSections(
        sections["broker"], sections["store"], sections["ha"], sections["replicas"]
    )
    read_faults.watch(fault_note(config.store.root))
    service = BrokerService(config, main.fail)
    await service.start()
    try:
        await main.stopped()
    finally:
        await service.close()


if __name__ == "__main__":
    sys.exit(run_server("broker", SECTIONS, serve))
