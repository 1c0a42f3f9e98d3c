"""`batonmq up`: a local cluster in the foreground."""

import contextlib
import sys

from batonmq.launcher.cluster import LocalCluster, stop_event
from batonmq.launcher.events import ClusterEvent, report_json, report_line
from batonmq.launcher.forks import ForkServer
from batonmq.launcher.layout import Layout


async def run_up(
    layout: Layout, fork_server: ForkServer, *, respawn: bool, watchdog_s: float, as_json: bool
) -> int:
    """Runs the cluster until SIGTERM or ctrl-C; the exit code. Raises StartError."""
    stop = stop_event()
    view, report = None, report_json if as_json else report_line
    if not as_json and sys.stdout.isatty():
        from batonmq.launcher.live_view import LiveView  # rich takes long to load

        view = LiveView()
        report = view.report
    cluster = LocalCluster(layout, report, fork_server, respawn=respawn, watchdog_s=watchdog_s)
    cluster.announced = True
    try:
        if view is not None:
            view.attach(cluster)
        await cluster.start()
        assert cluster.hopeless is not None
        cluster.hopeless.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if cluster.hopeless.done():
            raise cluster.hopeless.result()
    finally:
        if view is not None:
            await view.close()
        await cluster.stop()
    with contextlib.suppress(OSError):  # as in `LocalCluster`: the reader may have ended
        report(ClusterEvent("stopped", "all processes have ended"))
    return 0
