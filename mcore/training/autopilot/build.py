"""Puts an autopilot together as the options say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mcore.config.run import Resolved, RunConfig
from mcore.data.builder import Datasets
from mcore.data.provenance import documents_between
from mcore.training.autopilot.alerts import Alerts
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.pilot import Autopilot
from mcore.training.initialize import Runtime
from mcore.training.step import StepFunctions

_LOG_NAME = "autopilot.jsonl"


def build_autopilot(
    config: RunConfig,
    resolved: Resolved,
    runtime: Runtime,
    steps: StepFunctions,
    datasets: Datasets,
) -> Autopilot:
    """The autopilot of a run; one rank writes its log and sends its alerts.

    Raises:
        ConfigError: the log cannot be written.
    """
    train_set = datasets[0]
    assert train_set is not None
    documents = partial(
        documents_between,
        train_set,
        config.data,
        micro_batch_size=resolved.micro_batch_size,
        data_parallel_size=resolved.data_parallel_size,
    )
    optimizer = config.optimizer
    return Autopilot(
        config.stability,
        runtime.ctx,
        steps,
        open_audit(config) if runtime.is_writer else None,
        documents,
        overflows=optimizer.scales_dynamically,
    )


def open_audit(config: RunConfig) -> AuditLog:
    """The audit log and the alert command that the options ask for.

    Raises:
        ConfigError: the log cannot be written.
    """
    options, path = config.stability, config.stability.autopilot_log
    acts = (
        options.loss_spike_policy != "off"
        or options.iterations_to_skip is not None
        or options.grad_norm_skip_threshold is not None
    )
    if path is None and config.checkpoint.save is not None and acts:
        path = str(Path(config.checkpoint.save) / _LOG_NAME)
    alerts = None if options.on_alert is None else Alerts(options.on_alert, options.alert_timeout)
    return AuditLog(path, alerts)
