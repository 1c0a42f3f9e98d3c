"""What a node says that does not answer a command, and what to do about it. `why`: the text of its
error without its address. Pure."""

from typing import Final

from batonmq.mqctl.context import SIGN, is_unsigned
from batonmq.protocol.codes import ResponseCode

_NO_SPACE: Final = ("disk is full", "waits for disk space", "No space left", "quota exceeded")
_AWAY: Final = "start it again; mqctl verdict says why it ended, and what is safe"
_SILENT: Final = "it hangs, or just starts: mqctl verdict says which, and what to do"
CLOSES: Final = (
    "it or a proxy before it closes connections. `connections_crowded_out` in its log: it has too"
    " few file descriptors, so raise LimitNOFILE (ulimit -n) and restart it; else it may take only"
    " TLS: BATONMQ_TLS_TRUST=ca.pem of its cluster, or mqctl contexts --trust"
)
_CERTIFICATE: Final = (
    "it runs: compare the dates of its certificate, and the clocks: mqctl secure status; new"
    " certificates: mqctl secure rotate"
)
_OTHERS: Final = (
    "it runs, and its certificate is of an authority that is not trusted here: take the ca.pem of"
    " its cluster (BATONMQ_TLS_TRUST, mqctl contexts --trust)"
)
_RIGHTS: Final = "a super user can allow it: mqctl acl create USER -r Cluster:* -a Get"


def may_not(why: str) -> bool:
    """Whether a node answered that this user has no right to ask."""
    return ResponseCode.NO_PERMISSION.name in why


def closes(why: str) -> bool:
    """Whether a node accepted the connection, and ended it without an answer."""
    return why.startswith("connection ended: ")


def distrusts(why: str) -> bool:
    """Whether one of the two refuses the other's certificate."""
    return "certificate" in why


def is_silent(why: str) -> bool:
    """Whether a node accepted the question, and did not answer in time."""
    return "no answer" in why


def lacks_disk_space(problem: str) -> bool:
    """Whether a process reports that a full disk or a quota keeps it from writing."""
    return any(sign in problem for sign in _NO_SPACE) and not lacks_descriptors(problem)


def lacks_descriptors(problem: str) -> bool:
    """Whether it has too few file descriptors: it waits for them as for disk space."""
    return "Too many open files" in problem


def refuses_client(why: str) -> bool:
    """Whether a node runs and answers this client nothing."""
    return may_not(why) or distrusts(why) or closes(why)


def of_others(why: str) -> bool:
    """Whether the authority of a certificate is not trusted here: a new certificate is no help."""
    return distrusts(why) and "issuer" in why


def next_step(why: str) -> str:
    if may_not(why):
        return SIGN if is_unsigned(why) else _RIGHTS
    if is_silent(why):
        return _SILENT
    if of_others(why):
        return _OTHERS
    return _CERTIFICATE if distrusts(why) else CLOSES if closes(why) else _AWAY
