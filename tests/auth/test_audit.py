"""The audit log on a disk that does not take it."""

from pathlib import Path

import pytest

from batonmq.auth.audit import AuditLog


def test_a_full_disk_costs_one_line_each_and_disturbs_no_end(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    audit = AuditLog(Path("/dev/full"))
    for _ in range(2):
        audit.changed("root", "10.0.0.1:5", 17, "Topic:T", "done")
    audit.close()
    lost = [record for record in caplog.messages if record.startswith("audit_line_lost")]
    assert len(lost) == 2 and "Topic:T" in lost[0]
    assert "audit_not_closed reason=No space left on device" in caplog.messages
    assert "Traceback" not in capfd.readouterr().err
