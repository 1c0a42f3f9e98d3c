"""`python -m namesrv.main -c FILE`: one name server, with a controller in it if told so.

FILE is YAML with a `namesrv:` and, for `enableControllerInNamesrv`, a `controller:` section, or
RocketMQ's `namesrv.conf`. SIGTERM and SIGINT end it cleanly; exit codes are those of
`settings.server_main`.
"""

import sys

from controller.config import ControllerConfig
from namesrv.config import NamesrvConfig
from namesrv.service import NamesrvService
from settings.server_main import ServerMain, run_server


async def serve(main: ServerMain) -> None:
    """Runs the name server until the process is told to stop."""
    service = NamesrvService(main.sections["namesrv"], main.sections["controller"])
    await service.start()
    try:
        await main.stopped()
    finally:
        await service.close()


def main() -> int:
    return run_server("namesrv", {"namesrv": NamesrvConfig, "controller": ControllerConfig}, serve)


if __name__ == "__main__":
    sys.exit(main())
