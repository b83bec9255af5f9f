"""Events reach the file and the command; a command that fails or hangs harms nothing."""

import json
import math
import sys
import time

import pytest

from mcore.errors import ConfigError
from mcore.training.arguments import build_config, parse
from mcore.training.autopilot.alerts import Alerts
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.build import open_audit


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_appended_as_strict_json(tmp_path):
    path = tmp_path / "new" / "audit.jsonl"
    for iteration in (3, 4):
        log = AuditLog(str(path))
        log.write(
            "spike", iteration=iteration, loss=math.nan, limits={"loss": math.inf}, ids=(1, 2)
        )
        log.close()
    first, second = read(path)
    assert (first["event"], first["iteration"], second["iteration"]) == ("spike", 3, 4)
    assert (first["loss"], first["limits"], first["ids"]) == ("nan", {"loss": "inf"}, [1, 2])
    assert first["time"].endswith("+00:00")


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--autopilot-log"):
        AuditLog(str(tmp_path / "file" / "audit.jsonl"))


def test_the_command_gets_every_message_on_its_standard_input(tmp_path):
    alerts = Alerts(f"cat >> {tmp_path}/got", 20.0)
    log = AuditLog(None, alerts)
    events = [log.write("spike", iteration=i) for i in range(3)]
    log.close()
    assert read(tmp_path / "got") == events


def test_a_command_that_fails_is_named_in_the_log(caplog):
    alerts = Alerts("echo no such pager >&2; exit 3", 20.0)
    alerts.send({"event": "spike"})
    alerts.close()
    assert "ended with code 3: no such pager" in caplog.text


def test_a_command_that_hangs_is_killed_with_its_children_and_holds_nobody_up(tmp_path, caplog):
    # The child would write the file if it lived on.
    alerts = Alerts(f"(sleep 8; touch {tmp_path}/alive) & sleep 100", 2.0)
    start = time.monotonic()
    alerts.send({"event": "spike"})
    assert time.monotonic() - start < 1.5
    time.sleep(3.0)
    alerts.close()
    assert "killed after 2 seconds" in caplog.text
    time.sleep(6.0)
    assert not (tmp_path / "alive").exists()


def test_more_messages_than_can_wait_are_dropped_with_a_word(caplog):
    alerts = Alerts(f"{sys.executable} -c 'import time; time.sleep(30)'", 0.3)
    for number in range(150):
        alerts.send({"number": number})
    assert "one was dropped" in caplog.text
    start = time.monotonic()
    alerts.close()
    assert time.monotonic() - start < 5.0


def test_the_limit_of_a_command_is_alert_timeout(caplog):
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --alert-timeout 0.3 --on-alert"
    log = open_audit(build_config(parse([*words.split(), "sleep 60"])))
    log.write("give_up", iteration=1)
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 5
    assert "messages were left" in caplog.text or "was killed after 0.3 seconds" in caplog.text
