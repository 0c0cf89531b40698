"""Every Prometheus metric that a process counts itself, declared once; what the ledger counts is in ``ledger_metrics``.

Owns names, labels and buckets. Never computes a value and never starts an HTTP server. Labels are closed sets (method,
outcome): no ids, no steps, no addresses, so that the number of series stays bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

REGISTRY = CollectorRegistry()
"""Registry of this process, apart from the default one that engines fill with their own metrics."""

RPC_SECONDS = Histogram(
    "rollbook_rpc_seconds",
    "Time the ledger server took for a call, long polls included, by method and outcome (ok or the error's class).",
    ("method", "outcome"),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    registry=REGISTRY,
)

RPC_RETRIES_TOTAL = Counter(
    "rollbook_rpc_retries_total",
    "Calls a client repeated with the same key, by method and reason (the error's class).",
    ("method", "reason"),
    registry=REGISTRY,
)
