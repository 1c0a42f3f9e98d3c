"""`python -m broker.main -c FILE`: one broker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot run (a taken port, a locked folder, damage),
2 for a configuration that cannot be read.
"""

from __future__ import annotations

import sys

import msgspec

from broker.config import BrokerConfig, ReplicasConfig
from broker.service import BrokerSections, BrokerService
from ha.config import HAConfig
from settings.server_main import ServerMain, run_server
from store.config import StoreConfig

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "broker": BrokerConfig,
    "store": StoreConfig,
    "ha": HAConfig,
    "replicas": ReplicasConfig,
}


# The flush thread, back from fdatasync, waits for the loop to let go of the interpreter: by default
# up to 5 ms, which every SYNC_FLUSH ack would wait as well.
SWITCH_INTERVAL_S = 0.0005


async def serve(main: ServerMain) -> None:
    """Runs a broker until it is told to stop or must."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sections = main.sections
    config = BrokerSections(
        sections["broker"], sections["store"], sections["ha"], sections["replicas"]
    )
    service = BrokerService(config, main.fail)
    await service.start()
    try:
        await main.stopped()
    finally:
        await service.close()


if __name__ == "__main__":
    sys.exit(run_server("broker", SECTIONS, serve))
