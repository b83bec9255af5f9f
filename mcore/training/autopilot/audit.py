"""What the autopilot did and why: one JSON object a line, kept across restarts and rollbacks."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from mcore.errors import ConfigError
from mcore.training.autopilot.alerts import Alerts
from mcore.training.records import plain

Event = dict[str, Any]


class AuditLog:
    """Appends events to a file and passes them on to the alert command; on one rank.

    An event is history: a rollback removes none, and a resumed run appends. Numbers that are not
    finite are written as text (`mcore.training.records.plain`).

    Args:
        path: the file; its directory is made if absent. None = no file.
        alerts: is told every event.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None, alerts: Alerts | None = None) -> None:
        self._alerts = alerts
        self._file: TextIO | None = None
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise ConfigError(f"--autopilot-log {path} cannot be written: {error}") from error

    def write(self, event: str, *, alert: bool = True, **details: Any) -> Event:
        """Write an event with the time, and return it.

        Args:
            event: what happened.
            alert: the alert command is to be told.
            **details: JSON data.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry: Event = {"event": event, "time": now, **plain(details)}
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        if alert and self._alerts is not None:
            self._alerts.send(entry)
        return entry

    def close(self) -> None:
        """Close the file and give the alert command a moment to end."""
        if self._file is not None:
            self._file.close()
        if self._alerts is not None:
            self._alerts.close()
