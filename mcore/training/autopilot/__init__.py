"""The stability autopilot: loss spikes and numbers that are not finite. See docs/autopilot.md."""

from mcore.training.autopilot.alerts import Alerts
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.build import build_autopilot
from mcore.training.autopilot.detector import Limits, SpikeDetector
from mcore.training.autopilot.pilot import Autopilot, RollBack

__all__ = [
    "Alerts",
    "AuditLog",
    "Autopilot",
    "Limits",
    "RollBack",
    "SpikeDetector",
    "build_autopilot",
]
