"""Resets of consumer groups that are not finished (R56). Pure.

An operator's reset (INVOKE_BROKER_TO_RESET_OFFSET, 222) runs until a member pulls from its offset.
Until then pulls from elsewhere are sent there, and older progress is not taken. It also ends when
POP or an operator sets the offset. The held pull of a member that has lost the queue does not end
it, as it does in Java. Origin: `ConsumerOffsetManager.resetOffsetTable`.

A reset begins with a record of the log, which every member carries out. Its end is not in the log:
it travels with the offsets (GET_ALL_CONSUMER_OFFSET, 43), and a master's answer counts for the
resets whose records it had carried out. So a new master never forgets a reset that was answered. It
may repeat one that a group took up in the last half second, and the group's progress since then is
lost.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

Running = dict[str, dict[int, int]]
"""`topic@group` to queue id to the log offset at which the record of the reset ends."""


class OffsetReset(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A group continues at `offsets` (by queue id) of a topic."""

    group: str
    topic: str
    offsets: dict[int, int]


class OffsetResets:
    """The resets of one broker. While one runs, the group's offset in that queue is the one that it
    set."""

    def __init__(
        self, set_offset: Callable[[str, str, int, int], None], changed: Callable[[], None]
    ) -> None:
        """`set_offset(group, topic, queue_id, offset)`; `changed` is called at each change."""
        self._set_offset = set_offset
        self._changed = changed
        self.running: Running = {}
        self.end = 0
        """Records that end up to here have begun their resets; no record does so twice."""
        self._taken_over = 0
        self.on_begin: Callable[[OffsetReset], object] = lambda reset: None
        self.changes = 0
        self.is_due = False
        """A reset is not in the file yet, and below a checkpoint the log is not read again."""

    def runs(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether progress of the group in this queue is from before a reset."""
        return bool(self.running) and queue_id in self.running.get(f"{topic}@{group}", ())

    def begin(
        self, resets: Iterable[OffsetReset], record_end: int, *, confirmed: bool = True
    ) -> None:
        """A record that ends at `record_end` has these resets; each new one goes to `on_begin`. Not
        `confirmed`: a new master takes the record over."""
        # A new master is shown a record twice: when it takes it over, and when it is confirmed.
        is_known = record_end <= max(self.end, self._taken_over)
        if confirmed:
            self.end = max(self.end, record_end)
        else:
            self._taken_over = max(self._taken_over, record_end)
        if is_known:
            return
        for reset in resets:
            for queue_id, offset in reset.offsets.items():
                self._set_offset(reset.group, reset.topic, queue_id, offset)
            queues = self.running.setdefault(f"{reset.topic}@{reset.group}", {})
            queues.update(dict.fromkeys(reset.offsets, record_end))
            self.is_due = True
            self._note_change()
            self.on_begin(reset)

    def finish(self, key: str, queue_id: int) -> None:
        """A member has pulled from the new offset, or the offset was set in another way."""
        queues = self.running.get(key, {})
        if queues.pop(queue_id, None) is None:
            return
        if not queues:
            del self.running[key]
        self._note_change()

    def _note_change(self) -> None:
        self.changes += 1
        self._changed()

    def from_master(
        self, theirs: Mapping[str, Mapping[int, int]], carried_out: int | None
    ) -> tuple[bool, Running]:
        """Takes over the resets that ran at the master when it had carried out the log up to
        `carried_out`. Returns whether that changes anything, and the resets of later records, which
        still run here. A Java master (None) knows of no resets."""
        after, later = {key: dict(queues) for key, queues in theirs.items()}, Running()
        if carried_out is not None:
            # Resets of earlier records that the master does not name have ended there.
            self.end = max(self.end, carried_out)
            for key, queues in self.running.items():
                if newer := {queue: end for queue, end in queues.items() if end > carried_out}:
                    later[key], after[key] = newer, after.get(key, {}) | newer
        before, self.running = self.running, after
        return before != after, later

    def forget(self, key: str, record_end: int) -> None:
        """A record that ends at `record_end` deletes the offsets of `topic@group`."""
        self._keep(lambda at: at > record_end, (key,))

    def log_ends(self, log_end: int) -> None:
        """The log was cut there: records behind it do not count."""
        self.end = min(self.end, log_end)
        self._keep(lambda at: at <= log_end, list(self.running))

    def _keep(self, stays: Callable[[int], bool], keys: Iterable[str]) -> None:
        for key in keys:
            queues = self.running.pop(key, {})
            if kept := {queue: at for queue, at in queues.items() if stays(at)}:
                self.running[key] = kept

    def role_left(self) -> None:
        """What this master took over is either confirmed by now, or comes again in the log."""
        self._taken_over = 0

    def clear(self) -> None:
        self.running, self.end, self._taken_over = {}, 0, 0
