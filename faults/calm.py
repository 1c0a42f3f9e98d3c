"""What is no fault: a master that hands over when told to, and full load."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, ClassVar

from bench import wire
from bench.proc import spawn_talking
from faults import checks
from faults.cluster import CLUSTER, ELECT_MASTER, GROUP
from faults.fault import Fault, Measure, Wound
from faults.load import Load
from faults.records import Ack, Finding

if TYPE_CHECKING:
    from faults.lab import Lab

END_S = 10.0


class PlannedSwitch(Fault):
    """`mqctl electMaster` of a slave, asked for by its own frame so that the moment is known."""

    name = "planned-switch"
    title = "`mqctl electMaster` under load: longest gap between acks"
    measure: ClassVar[Measure] = "gap"
    limit_s = 0.03
    watch_s = 1.0
    elections = (1, 1)

    def __init__(self) -> None:
        self._client: subprocess.Popen[str] | None = None
        self._told: dict[str, object] = {}

    def prepare(self, lab: Lab, rng: random.Random) -> None:
        lab.cluster.wait_whole()
        self._client = spawn_talking(
            [sys.executable, "-m", "faults.client", lab.cluster.name_servers],
            lab.folder / "client.log",
        )
        assert self._client.stdout is not None
        if self._client.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the client did not start, see {lab.folder / 'client.log'}")

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        group = lab.cluster.wait_whole()
        chosen = lab.slaves(rng)[0]
        leader = lab.cluster.layout.name_servers[lab.cluster.wait_leader()].controller_address
        ext = {
            "clusterName": CLUSTER,
            "brokerName": GROUP,
            "brokerId": str(group.broker_ids[chosen]),
            "designateElect": "true",
            "invokeTime": str(wire.now_ms()),
        }
        at = time.monotonic()
        reply = wire.ask(leader, ELECT_MASTER, ext)
        took = time.monotonic() - at
        notes: dict[str, object] = {"code": reply.code, "answeredS": took, "chosen": chosen}
        if reply.code != wire.OK:
            notes["remark"] = reply.remark
        return Wound(at, notes=notes)

    def heal(self, lab: Lab, wound: Wound) -> None:
        client, self._client = self._client, None
        assert client is not None and client.stdin is not None and client.stdout is not None
        client.stdin.close()
        wound.notes["client"] = self._told = json.loads(client.stdout.readline() or "{}")
        client.stdout.close()
        client.wait(END_S)

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        found = []
        if wound.notes["code"] != wire.OK:
            found.append(Finding("switch refused", f"{wound.notes}"))
        if self._told.get("failed") != []:
            found.append(Finding("failed sends", f"of our client: {self._told}"))
        group = lab.cluster.wait_whole()
        if group.master != wound.notes["chosen"]:
            found.append(Finding("switch", f"master is {group.master}: {wound.notes}"))
        return found


class FullLoad(Fault):
    """As much as is acknowledged, for minutes: nobody is judged dead for being busy."""

    name = "full-load"
    title: ClassVar[str] = "a minute of full load: longest gap between acks"
    measure: ClassVar[Measure] = "gap"
    elections = (0, 0)
    in_soak = False
    trials_at_most = 1
    prefix: ClassVar[str] = "full"
    minutes: ClassVar[float] = 1.0

    @classmethod
    def last_for(cls, minutes: float) -> None:
        cls.minutes = minutes
        cls.title = f"{minutes:g} minutes of full load: longest gap between acks"

    def __init__(self) -> None:
        self._acks: list[Ack] = []

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        at = time.monotonic()
        load = Load(
            lab.cluster.addresses,
            prefix=self.prefix,
            log=lab.folder / "full-load.log",
            options=["--full-load", "--interval-ms", "5", "--senders", "4", "--body", "256"],
        )
        try:
            time.sleep(self.minutes * 60)
        finally:
            load.stop()
        seconds = time.monotonic() - at
        self._acks = load.acks
        return Wound(at, notes={"ackedPerS": round(len(load.acks) / seconds), "seconds": seconds})

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        stored = lab.stored_by(self.prefix)
        return [*checks.check_lost(self._acks, stored), *checks.check_order(self._acks, stored)]
