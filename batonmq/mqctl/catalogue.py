"""All commands of mqctl: their families, what each does in a line, and which module has it.

A table of its own, so that the list of commands and the completion of their names import none of
them: the modules of commands import at their top what they need, such as the client.
"""

import re
from typing import Final

FAMILIES: Final[dict[str, dict[str, str]]] = {
    "Cluster": {
        "health": "Check nodes, masters, sets, and the controllers' leader",
        "verdict": "Say what broke, what is safe and why, and what each repair costs",
        "doctor": "Pack verdict, evidence, logs, settings, metrics and histories into one file",
        "timeline": "Failovers and other changes of a cluster, step by step, each as a story",
        "top": "The rates of brokers, topics and groups, live until ctrl-C",
        "clusterList": "Clusters and their brokers, with rates",
        "brokerStatus": "Runtime figures of brokers",
        "getBrokerConfig": "Settings of brokers, as they are in force",
        "updateBrokerConfig": "Change a setting of brokers while they run",
        "roll": "Restart every process, one after the other, under load",
        "up": "Add, remove or restart processes of a running `batonmq up`, under load",
        "exportMetadata": "Write topics, groups, offsets, settings, users and rights to a file",
        "importMetadata": "Make what a FILE of exportMetadata has: topics, groups, offsets",
    },
    "Topics": {
        "topicList": "All topics",
        "topicRoute": "Which brokers hold a topic",
        "topicStatus": "Offsets of every queue of a topic",
        "statsAll": "What comes into each topic, what its groups get, and how far they are behind",
        "getTopicConfig": "Settings of a topic at each master",
        "updateTopic": "Create a topic, or change what is given of it",
        "deleteTopic": "Delete a topic from brokers and name servers",
        "describe": "Show settings, sizes and users of a topic or of a consumer group",
    },
    "Messages": {
        "sendMessage": "Send one message",
        "consumeMessage": "Read what a topic holds now, without committing",
        "tail": "Show the last messages of a topic, one a line, and with -f those that come",
        "queryMsgById": "Find a message by its id",
        "queryMsgByKey": "Find messages by key",
        "queryMsgByOffset": "Show the message at an offset of a queue",
        "dlq": "Dead letters: list groups, show those of one, send them again",
        "bench": "Put load on a TOPIC: rate and percentiles",
    },
    "Consumers": {
        "consumerProgress": "How far consumer groups are behind",
        "consumerConnection": "Who is connected as a member of a group, and what it subscribes to",
        "getConsumerConfig": "Settings of a consumer group at each master",
        "updateSubGroup": "Create a consumer group, or change what is given of it",
        "deleteSubGroup": "Delete a consumer group",
        "producerConnection": "Who is connected as a producer of a group",
        "brokerConsumeStats": "How far all groups of a broker are, queue by queue",
        "resetOffset": "Let a group continue at a store time, or one queue of it at an offset",
        "skip": "Let a group continue at the end of a topic: it skips what waits for it now",
    },
    "Replication": {
        "getSyncStateSet": "Master and in-sync replicas, from the controllers",
        "haStatus": "What masters have sent to their slaves",
        "getBrokerEpoch": "The epochs in the log of each replica",
        "repairReplica": "Trust the log of a suspect replica again",
        "verifyStore": "Check every record of a store's commit log, from its files alone",
        "backup": "Copy a broker's store up to a confirmed offset, also while it runs",
        "restore": "Make stores of a backup, for brokers that start on them",
        "drain": "Make a broker ready to be stopped: move the master away if it is that",
        "undrain": "Wait until a broker is in its set again",
        "migrate": "Turn a group of Java brokers into one of BatonMQ brokers, or back",
    },
    "Controllers": {
        "getControllerMetaData": "Who leads the controllers, and how far each one's log is",
        "getControllerConfig": "Settings of each controller",
        "updateControllerConfig": "Change a setting of the controllers",
        "electMaster": "Make a replica the master of its group",
        "cleanBrokerMetadata": "Make the controllers forget dead replicas",
    },
    "Analysis": {
        "epochHistory": "Masterships, failovers, unavailability: tables and report",
        "messageAudit": "Replicas' stores against each other and an acknowledged list",
        "topicStats": "Volume, rates, delays, hot queues, slow consumers: tables and report",
        "streamHistory": "Stream the history of a running cluster to Parquet",
        "topicTable": "Keep a topic as a Delta or Iceberg table, each message once",
    },
    "Security": {
        "secure": "Make and renew certificates and secrets, check ports, turn TLS on and off",
        "user": "List users; show, create, update, delete or rotate NAME",
        "acl": "What users may do: list, change, explain, import",
        "whoami": "The user that signs here, as name servers see it",
    },
    "Shell": {
        "contexts": "List the clusters that have a name; with NAME and -n (and -a) keep one",
        "completion": "Print the completion script of a shell",
    },
}
"""Family -> command -> what it does; its help begins with that."""
SUMMARIES: Final = {name: text for family in FAMILIES.values() for name, text in family.items()}
_SHARED: Final[dict[str, str]] = {
    "cluster": "clusterList brokerStatus getBrokerConfig updateBrokerConfig",
    "metadata": "exportMetadata importMetadata",
    "topic": "topicList topicRoute topicStatus statsAll getTopicConfig updateTopic deleteTopic",
    "message": "sendMessage consumeMessage tail queryMsgById queryMsgByKey queryMsgByOffset",
    "consumer": "consumerProgress consumerConnection resetOffset skip",
    "groups": "getConsumerConfig updateSubGroup deleteSubGroup "
    "producerConnection brokerConsumeStats",
    "ha": "getSyncStateSet haStatus getBrokerEpoch repairReplica",
    "verify": "verifyStore",
    "backup": "restore",
    "election": "drain undrain electMaster",
    "controller": "getControllerMetaData getControllerConfig "
    "updateControllerConfig cleanBrokerMetadata",
    "analysis": "epochHistory messageAudit topicStats streamHistory topicTable",
    "users": "user acl whoami",
    "shell": "contexts completion",
}
"""Module -> its commands with spaces between them, but for the one that has its name."""
MODULES: Final = {
    **{name: name for name in SUMMARIES},
    **{name: module for module, names in _SHARED.items() for name in names.split()},
}
"""Command -> its module in `mqctl.commands`."""


def kebab(name: str) -> str:
    """`getSyncStateSet` -> `get-sync-state-set`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
