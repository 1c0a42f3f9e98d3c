"""What operators ask stock mqadmin every day, in one order on one fresh group, and what to compare
of its answers. `tests/golden/java-5.3.3-tools/mqadmin.json` has what it printed on Java."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from batonmq.protocol import fastjson
from lab.cluster.java import JavaProgram

TOPIC, GROUP = "Daily", "daily-group"
SAME, KEYS, DONE, GROUPS = "same", "keys", "done", "groups"
"""What is compared: each line without what differs between two runs; the names in front of `=`,
`:` or else the first words, of which ours has all that Java has; that it works; that it names the
group: Java's answer to QUERY_TOPIC_CONSUME_BY_WHO (300) names the topic as its own group."""
N, C, CLUSTER = "-n $NS", "-a $CONTROLLER", "-c DefaultCluster"
DAILY: Final[tuple[tuple[str, str], ...]] = (
    (f"updateTopic {N} {CLUSTER} -t {TOPIC} -r 4 -w 4", SAME),
    (f"updateTopic {N} -b $BROKER -t DailyOne -r 1 -w 1 -a +message.type=FIFO", SAME),
    (f"updateTopicPerm {N} -b $BROKER -t DailyOne -p 4", SAME),
    (f"updateSubGroup {N} {CLUSTER} -g {GROUP}-made -r 3", KEYS),
    (f"setConsumeMode {N} -b $BROKER -t {TOPIC} -g {GROUP}-made -m PULL", SAME),
    (f"sendMessage {N} -t {TOPIC} -p first -k key1 -c tag -b broker-a -i 0", SAME),
    (f"consumeMessage {N} -t {TOPIC} -b broker-a -i 0 -o 0 -c 1", SAME),
    (f"topicRoute {N} -t {TOPIC}", SAME),
    (f"topicRoute {N} -t {TOPIC} -l", SAME),
    (f"topicClusterList {N} -t {TOPIC}", SAME),
    (f"topicStatus {N} -t {TOPIC}", SAME),
    (f"topicList {N}", SAME),
    (f"topicList {N} -c", GROUPS),
    (f"statsAll {N} -t {TOPIC}", GROUPS),
    (f"clusterList {N}", KEYS),
    (f"clusterList {N} -m", KEYS),
    ("brokerStatus $NSBROKER", KEYS),
    ("getBrokerConfig $NSBROKER", DONE),
    (f"queryMsgByKey {N} -t {TOPIC} -k key1", SAME),
    (f"queryMsgByUniqueKey {N} -t {TOPIC} -i $UNIQUE", GROUPS),
    (f"queryMsgById {N} -t {TOPIC} -i $OFFSET", SAME),
    (f"queryMsgByOffset {N} -t {TOPIC} -b broker-a -i 0 -o 0", GROUPS),
    (f"printMsg {N} -t {TOPIC} -d true", SAME),
    (f"printMsgByQueue {N} -t {TOPIC} -a broker-a -i 0 -p true -d true", SAME),
    (f"queryCq {N} -t {TOPIC} -q 0 -i 0 -c 2 -b $BROKER", SAME),
    (f"queryCq {N} -t {TOPIC} -q 0 -i 0 -c 2 -b $BROKER -g {GROUP}", SAME),
    (f"consumerProgress {N} -g {GROUP} -t {TOPIC}", SAME),
    (f"consumerProgress {N}", SAME),
    (f"consumerConnection {N} -g {GROUP}", SAME),
    (f"consumerStatus {N} -g {GROUP}", SAME),
    (f"getConsumerConfig {N} -g {GROUP}-made", KEYS),
    (f"producerConnection {N} -g nobody -t {TOPIC}", SAME),
    ("producer -b $BROKER", KEYS),
    ("brokerConsumeStats -b $BROKER", SAME),
    (f"allocateMQ {N} -t {TOPIC} -i 10.0.0.1,10.0.0.2", SAME),
    (f"cloneGroupOffset {N} -s {GROUP} -d {GROUP}-clone -t {TOPIC}", SAME),
    (f"resetOffsetByTime {N} -g {GROUP} -t {TOPIC} -s 0", SAME),
    (f"skipAccumulatedMessage {N} -g {GROUP}-clone -t {TOPIC}", SAME),
    (f"updateBrokerConfig {N} -b $BROKER -k fileReservedTime -v 71", SAME),
    (f"updateBrokerConfig {N} -b $BROKER -k sendMessageThreadPoolNums -v 9", SAME),
    (f"updateKvConfig {N} -s DAILY -k one -v two", SAME),
    (f"deleteKvConfig {N} -s DAILY -k one", SAME),
    (f"updateOrderConf {N} -t {TOPIC} -m get", SAME),
    (f"wipeWritePerm {N} -b broker-a", SAME),
    (f"addWritePerm {N} -b broker-a", SAME),
    (f"cleanExpiredCQ {N} {CLUSTER}", SAME),
    (f"cleanUnusedTopic {N} {CLUSTER}", SAME),
    (f"deleteExpiredCommitLog {N} {CLUSTER}", SAME),
    (f"getNamesrvConfig {N}", DONE),
    (f"exportMetadata {N} {CLUSTER} -f $FOLDER", SAME),
    (f"exportConfigs {N} {CLUSTER} -f $FOLDER", SAME),
    (f"exportMetrics {N} {CLUSTER} -f $FOLDER", SAME),
    (f"haStatus {N} -b $BROKER", KEYS),
    (f"getBrokerEpoch {N} -b broker-a", SAME),
    (f"getSyncStateSet {C} -b broker-a", SAME),
    (f"getControllerMetaData {C}", SAME),
    (f"getControllerConfig {C}", DONE),
    (f"updateControllerConfig {C} -k notifyBrokerRoleChanged -v true", SAME),
    (f"deleteSubGroup {N} -b $BROKER -g {GROUP}-made -r true", SAME),
    (f"deleteTopic {N} {CLUSTER} -t DailyOne", SAME),
)
_RACE: Final = "RemotingSendRequestException"
"""The stock client meets a race of its own: a request into a channel that it closes."""
_NOISE: Final = re.compile(r" \|-(?:INFO|WARN) in |^$")
_WHAT_DIFFERS: Final = (
    # Our records have a CRC of their properties, others stand before the first one, a master has
    # an id of its own, and the name of the controllers' group is configured.
    (r"\d{4}-\d\d-\d\d[ #]\d\d:\d\d:\d\d[.,:]?\d*", "TIME"),
    (r"\d{1,3}(?:\.\d{1,3}){3}(?:@[\w#@]+|:\d+)?", "HOST"),
    (r"\b[0-9A-F]{32,56}\b", "ID"),
    (r"(?<=[ =:])-?\d{5,}\b", "NUMBER"),
    (r"-?\d+\.\d+(?:E-?\d+)?", "RATE"),
    (r"\d+(?= ms\b)", "MS"),
    (
        r"\bcommitLogOffset=\d+|CommitLog Offset: +\d+|\bstoreSize=\d+|Store Size: +\d+"
        r"|physicOffset=\d+|physicSize=\d+|(?<=OK, )\d+|(?<=startOffset=)\d+|(?<=endOffset=)\d+"
        r"|(?<=#brokerId)\s+\d+|(?<=remoteIP=)/|(?<=#ControllerGroup)\s+\S+",
        "",
    ),
)


def told(output: str) -> list[str]:
    """The lines without what differs between two runs, sorted: tables of Java have no order."""
    output = "\n".join(line for line in output.splitlines() if not _NOISE.search(line))
    for pattern, name in _WHAT_DIFFERS:
        output = re.sub(pattern, name, output)
    return sorted({re.sub(r"\s+", " ", line).strip() for line in output.splitlines()} - {""})


def names(output: str) -> list[str]:
    """What stands in front of `=` or `:`, or else the first word of each line."""
    lines = filter(None, map(str.strip, output.splitlines()))
    found = (re.match(r"[^\s=:]+", line.lstrip("#{ \"'")) for line in lines)
    return sorted({each[0] for each in found if each})


class Daily:
    """One run of the commands."""

    def __init__(self, mqadmin: JavaProgram, places: dict[str, str], folder: Path) -> None:
        """`places`: NS, BROKER, CONTROLLER."""
        self._mqadmin = mqadmin
        self._folder = folder
        self._given = {
            **places,
            "NSBROKER": f"-n {places['NS']} -b {places['BROKER']}",
            "FOLDER": str(folder),
        }

    def run(
        self, consume: Callable[[], None], first_to_ask: str = f"topicStatus {N} -t {TOPIC}"
    ) -> Iterator[tuple[str, str, str]]:
        """(command, what to compare, output). `consume` is called before the first question: a
        member of GROUP has read the message then."""
        for command, how in DAILY:
            if command == first_to_ask:
                consume()
            yield command, how, self._ask(command)

    def _ask(self, command: str) -> str:
        words = command
        for name, value in sorted(self._given.items(), key=lambda item: -len(item[0])):
            words = words.replace(f"${name}", value)
        output = _RACE
        while _RACE in output:
            line = self._mqadmin.ask("\t".join(words.split()), 60.0)
            output = line["output"] + line["error"]
        if sent := re.search(r"\b([0-9A-F]{32,56})\b", output):
            self._given.setdefault("UNIQUE", sent[1])
        if found := re.search(r"offsetID: *(\w+)", output, re.IGNORECASE):
            self._given["OFFSET"] = found[1]
        if command.startswith("export"):
            name = {"exportMetadata": "metadata", "exportConfigs": "configs"}
            file = self._folder / f"{name.get(command.split()[0], 'metrics')}.json"
            output += "\n".join(_leaves(fastjson.loads(file.read_bytes())))
        return output.replace(str(self._folder), "FOLDER")


def _leaves(document: object, at: str = "") -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _leaves(value, f"{at}.{key}")
    elif isinstance(document, list):
        yield from (f"{at}[] {each}" for each in sorted(map(str, document)))
    else:
        yield f"{at} = {document}"
