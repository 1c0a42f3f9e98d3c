"""`python -m batonmq.namesrv.main -c FILE`: one name server, and its controller if configured.

FILE is YAML with a `namesrv:` and, for `enableControllerInNamesrv`, a `controller:` section, or
RocketMQ's `namesrv.conf`. SIGTERM and SIGINT end it cleanly; exit codes are those of
`batonmq.runtime.server_main`.
"""

import sys

from batonmq.runtime.extras import need_server

if __name__ == "__main__":
    need_server("namesrv")  # before the imports that would fail

import msgspec

from batonmq.auth.config import AuthConfig
from batonmq.controller.config import ControllerConfig
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.runtime.metrics import MetricsConfig
from batonmq.runtime.server_main import ServerMain, run_server, started
from batonmq.runtime.tls import TlsConfig

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "namesrv": NamesrvConfig,
    "controller": ControllerConfig,
    "metrics": MetricsConfig,
    "tls": TlsConfig,
    "auth": AuthConfig,
}


async def serve(main: ServerMain) -> None:
    service = NamesrvService(
        main.sections["namesrv"], main.sections["controller"], main.tls, main.sections["auth"]
    )
    main.metrics.show(service)
    if service.controller is not None:
        main.metrics.show(service.controller.metrics)
    if not await started(service.start(main.serving), main.stop_requested()):
        return
    try:
        await main.stopped()
    finally:
        await service.close()


def main() -> int:
    return run_server("namesrv", SECTIONS, serve)


if __name__ == "__main__":
    sys.exit(main())
