"""What is no fault: a planned switch, and full load."""

import random
import time
from typing import ClassVar

from lab.cluster import checks, frames
from lab.cluster.acks import Ack
from lab.cluster.checks import BrokenPromise
from lab.cluster.cluster import CLUSTER, GROUP
from lab.cluster.connection import ask
from lab.cluster.load import Load
from lab.cluster.processes import Helper
from lab.faults.trial import Fault, InjectedFault, Lab

FULL_LOAD_S = 600.0


class SwitchFault(Fault):
    """`mqctl electMaster` of a slave, by a frame of our own so that its moment is known."""

    name = "planned-switch"
    title = "`mqctl electMaster` under load: longest gap between acks"
    measure = "gap"
    limit_s = 0.03
    watch_s = 1.0
    elections = (1, 1)

    def __init__(self) -> None:
        self._client: Helper | None = None
        self._sent: dict[str, object] = {}

    def prepare(self, lab: Lab, rng: random.Random) -> None:
        lab.cluster.wait_whole()
        log = lab.folder / "client.log"
        self._client = Helper("lab.faults.client", lab.cluster.name_servers, log=log)
        self._client.wait_ready()

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        group = lab.cluster.wait_whole()
        chosen = lab.slaves(rng)[0]
        leader = lab.cluster.controllers[lab.cluster.wait_leader()]
        ext = {
            "clusterName": CLUSTER,
            "brokerName": GROUP,
            "brokerId": str(group.broker_ids[chosen]),
            "designateElect": "true",
            "invokeTime": str(frames.now_ms()),
        }
        at = time.monotonic()
        reply = ask(leader, frames.ELECT_MASTER, ext)
        took = time.monotonic() - at
        notes: dict[str, object] = {"code": reply.code, "answeredS": took, "chosen": chosen}
        if reply.code != frames.OK:
            notes["remark"] = reply.remark
        return InjectedFault(at, notes=notes)

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        client, self._client = self._client, None
        assert client is not None
        injected.notes["client"] = self._sent = client.finish()

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        found = []
        if injected.notes["code"] != frames.OK:
            found.append(BrokenPromise("switch refused", f"{injected.notes}"))
        if self._sent.get("failed") != []:
            found.append(BrokenPromise("failed sends", f"of our client: {self._sent}"))
        group = lab.cluster.wait_whole()
        if group.master != injected.notes["chosen"]:
            found.append(BrokenPromise("switch", f"master is {group.master}: {injected.notes}"))
        return found


class FullLoad(Fault):
    """As much as is acknowledged, for minutes: no busy process may be called dead."""

    name = "full-load"
    title = "ten minutes of full load: longest gap between acks"
    measure = "gap"
    elections = (0, 0)
    in_soak = False
    trials_at_most = 1
    prefix: ClassVar[str] = "full"

    def __init__(self) -> None:
        self._acks: list[Ack] = []

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        at = time.monotonic()
        load = Load(
            lab.cluster.addresses,
            prefix=self.prefix,
            log=lab.folder / "full-load.log",
            options=["--full-load", "--interval-ms", "5", "--senders", "4", "--body", "256"],
        )
        try:
            time.sleep(FULL_LOAD_S)
        finally:
            load.stop()
        seconds = time.monotonic() - at
        self._acks = load.acks
        return InjectedFault(
            at, notes={"ackedPerS": round(len(load.acks) / seconds), "seconds": seconds}
        )

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        stored = lab.stored_by(self.prefix)
        return [*checks.check_lost(self._acks, stored), *checks.check_order(self._acks, stored)]
