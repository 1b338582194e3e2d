"""Heartbeats between ranks: detection of lost, silent and diverged ranks.

Used only in a job with a launcher (torchrun, ``fxpart train --nproc``). Otherwise there is no
monitor, thread or connection, and all functions here do nothing.
"""

from fxpart.runtime.heartbeat.monitor import HeartbeatMonitor
from fxpart.runtime.heartbeat.peer_diagnosis import PeerDiagnosis
from fxpart.runtime.heartbeat.process_monitor import (
    describe_exit_exception,
    diagnose_failed_wait,
    get_monitor,
    install_monitor,
    report_last_event,
    set_exit_callback,
)
from fxpart.runtime.heartbeat.rendezvous import connect_monitor, exchange_through_store

__all__ = [
    "HeartbeatMonitor",
    "PeerDiagnosis",
    "connect_monitor",
    "describe_exit_exception",
    "diagnose_failed_wait",
    "exchange_through_store",
    "get_monitor",
    "install_monitor",
    "report_last_event",
    "set_exit_callback",
]  # fmt: skip
