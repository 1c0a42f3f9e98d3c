"""`python -m batonmq.controller.main -c FILE`: one controller node by itself.

FILE is YAML with a `controller:` section, or RocketMQ's `controller.conf`. SIGTERM and SIGINT end
it cleanly; exit codes are those of `batonmq.runtime.server_main`.
"""

import sys

from batonmq.runtime.extras import need_server

if __name__ == "__main__":
    need_server("controller")  # before the imports that would fail

import msgspec

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.controller.config import ControllerConfig
from batonmq.controller.service import ControllerService
from batonmq.runtime.metrics import MetricsConfig
from batonmq.runtime.server_main import ServerMain, run_server, started
from batonmq.runtime.tls import TlsConfig

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "auth": AuthConfig,
    "controller": ControllerConfig,
    "metrics": MetricsConfig,
    "tls": TlsConfig,
}
ONLY_OF_ITS_FILE = (
    " (this controller runs by itself: it knows the nodes and initAuthenticationUser, with the"
    " secrets of its file)"
)


async def serve(main: ServerMain) -> None:
    """Runs the node until the process is to stop."""
    guard = guard_of(main.sections["auth"])
    service = ControllerService(main.sections["controller"], tls=main.tls, guard=guard)
    main.metrics.show(service.metrics)
    if not await started(service.start(main.serving), main.stop_requested()):
        return
    try:
        await main.stopped()
    finally:
        await service.close()
        if guard is not None:
            guard.close()


def guard_of(auth: AuthConfig) -> Guard | None:
    """No master brings users to a controller by itself: it knows the nodes, and the first user of
    its file."""
    if not auth.authentication_enabled:
        return None
    guard = Guard(auth, "", None)
    guard.hint = ONLY_OF_ITS_FILE
    book = guard.book("file", "")
    if auth.first_user is not None:
        book.fix(auth.first_user)
    return guard


def main() -> int:
    return run_server("controller", SECTIONS, serve)


if __name__ == "__main__":
    sys.exit(main())
