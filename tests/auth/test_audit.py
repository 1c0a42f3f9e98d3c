"""The audit log on a disk that does not take it."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from batonmq.auth.audit import AuditLog, _PrivateFile
from batonmq.runtime import disk


def wait_for_the_writer(audit: AuditLog) -> None:
    assert audit._listener is not None
    audit._listener.stop()
    audit._listener.start()


def test_a_full_disk_costs_one_line_each_and_disturbs_no_end(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    audit = AuditLog(Path("/dev/full"))
    for _ in range(2):
        audit.changed("root", "10.0.0.1:5", 17, "Topic:T", "done")
    audit.close()
    assert "No space left on device" in audit.failure
    lost = [record for record in caplog.messages if record.startswith("audit_line_lost")]
    assert len(lost) == 2 and "Topic:T" in lost[0]
    assert any(
        line.startswith("audit_not_closed reason='No space left") for line in caplog.messages
    )
    assert "Traceback" not in capfd.readouterr().err


def test_each_line_tries_again_what_the_disk_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker did not start, and each line behind a rotation that failed was lost."""
    monkeypatch.setattr("batonmq.auth.audit.FILE_BYTES", 200)
    path = tmp_path / "logs" / "audit.log"
    (tmp_path / "logs").write_text("no folder yet")
    audit = AuditLog(path)
    audit.changed("root", "10.0.0.1:5", 17, "Topic:lost", "done")
    wait_for_the_writer(audit)
    (tmp_path / "logs").unlink()
    audit.changed("root", "10.0.0.1:5", 17, "Topic:first", "done")
    wait_for_the_writer(audit)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", Mock(side_effect=OSError(errno.EPERM, "it only grows")))
        audit.changed("root", "10.0.0.1:5", 17, "Topic:second", "done")
        wait_for_the_writer(audit)
    audit.changed("root", "10.0.0.1:5", 17, "Topic:third", "done")
    audit.close()
    reported = [line.partition(" ")[0] for line in caplog.messages]
    assert reported == ["audit_log_not_open", "audit_line_lost", "audit_log_not_rotated"]
    assert "lost" in caplog.messages[1] and "File exists" in caplog.messages[1]
    assert [json.loads(line)["resource"] for line in path.read_text().splitlines()] == [
        "Topic:third"
    ]
    rotated = (tmp_path / "logs" / "audit.log.1").read_text().splitlines()
    assert [json.loads(line)["resource"] for line in rotated] == ["Topic:first", "Topic:second"]


def test_a_file_that_failed_is_tried_again_without_a_new_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mqctl health` names the reason; it must be gone once an operator has made room."""
    monkeypatch.setattr("batonmq.auth.audit.RETRY_S", 0.001)
    opened, flush = threading.Event(), _PrivateFile.flush

    def flushed(file: _PrivateFile) -> None:
        flush(file)
        opened.set()

    monkeypatch.setattr(_PrivateFile, "flush", flushed)
    (tmp_path / "logs").write_text("no folder yet")
    audit = AuditLog(tmp_path / "logs" / "audit.log")
    assert "File exists" in audit.failure
    (tmp_path / "logs").unlink()
    assert opened.wait(10) and audit.failure == ""
    audit.close()


@pytest.mark.parametrize("refused", ["audit.log", "audit.log.0", "audit.log.2"])
def test_a_rotation_that_is_refused_drops_no_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """`chattr +a` of the newest one: each line tried again, and dropped one more of the older."""
    monkeypatch.setattr("batonmq.auth.audit.FILE_BYTES", 1)
    path = tmp_path / "audit.log"
    for number in range(1, 6):
        (tmp_path / f"audit.log.{number}").write_text(f"older {number}")
    path.write_text("newest")

    def unless_refused(rename: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def renamed(source: str, target: str) -> None:
            if Path(source).name == refused:
                raise OSError(errno.EPERM, "it only grows")
            rename(source, target)

        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", unless_refused(os.rename))
        patch.setattr(disk, "replace", unless_refused(disk.replace))
        audit = AuditLog(path)
        for _ in range(6):
            audit.changed("root", "10.0.0.1:5", 17, "Topic:T", "done")
        audit.close()
    left = "".join(file.read_text() for file in tmp_path.iterdir())
    assert left.count("Topic:T") == 6 and "newest" in left
    # The oldest one makes room for a file that could be renamed.
    assert [f"older {n}" in left for n in range(1, 6)] == [True] * 4 + [refused == "audit.log"]
    audit = AuditLog(path)
    audit.changed("root", "10.0.0.1:5", 17, "Topic:T", "done")
    audit.close()
    assert len(list(tmp_path.iterdir())) == 6, "the next one ends what was begun"
