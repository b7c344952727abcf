"""Prometheus metrics. Counters live in one Redis hash and are raised by the script that writes a result.

So they are exact (a job that ran twice is counted once), shared by all API processes and survive their restarts.
Field names of the hash: ``name`` or ``name|label=value``, histograms as ``name:bucket``. Gauges are read when asked.
GPU lock use is the time spent in the ``time`` stage, which holds the GPU alone. Xid errors are not read (that needs
root); failures that they cause show as ``drk_gym_faults_total``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from drk.gym.serve.jobs import Outcome

BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
COUNTERS = {
    "submitted": ("drk_gym_jobs_submitted", "Jobs accepted", ""),
    "worker_deaths": ("drk_gym_worker_deaths", "Jobs whose worker died", ""),
    "cache_hits": ("drk_gym_cache_hits", "Jobs answered from the result cache", ""),
    "jobs": ("drk_gym_jobs_finished", "Jobs finished, by state", "state"),
    "verdicts": ("drk_gym_verdicts", "Verdicts, by status", "status"),
    "rungs": ("drk_gym_verdict_rungs", "Verdicts, by the rung reached", "rung"),
    "flags": ("drk_gym_verdict_flags", "Flags raised, by kind", "kind"),
    "faults": ("drk_gym_faults", "Jobs without a kernel result, and verdicts of status error, by code", "code"),
    "gpu_lock_s": ("drk_gym_gpu_lock_seconds", "Time that GPUs were held for timing alone", "device_class"),
}
HISTOGRAMS = {
    "queue_s": ("drk_gym_queue_wait_seconds", "From submission to start"),
    "run_s": ("drk_gym_run_seconds", "From start to result"),
}


def increments_of(outcome: Outcome, queue_s: float, device_class: str) -> dict[str, float]:
    """Return what one finished job adds to the hash."""
    found: dict[str, float] = defaultdict(float)
    found[f"jobs|{outcome.state}"] += 1
    _observe(found, "queue_s", queue_s)
    _observe(found, "run_s", outcome.run_s)
    if outcome.fault is not None and outcome.state == "failed":
        found[f"faults|{outcome.fault.code}"] += 1
    verdict = outcome.verdict
    if verdict is not None:
        found[f"verdicts|{verdict['status']}"] += 1
        found[f"rungs|{verdict['reached'] or 'none'}"] += 1
        for kind in {flag["kind"] for flag in verdict["flags"]}:
            found[f"flags|{kind}"] += 1
        if verdict["status"] == "error":
            found[f"faults|{(verdict['error'] or {}).get('kind', 'error')}"] += 1
        for stage, seconds in verdict["timings_s"].items():
            _observe(found, f"stage_s|{stage}", seconds)
        found[f"gpu_lock_s|{device_class}"] += verdict["timings_s"].get("time", 0.0)
    return dict(found)


def _observe(found: dict[str, float], name: str, seconds: float) -> None:
    bucket = next((str(limit) for limit in BUCKETS_S if seconds <= limit), "+Inf")
    found[f"{name}:{bucket}"] += 1
    found[f"{name}:sum"] += seconds


def _histogram(values: Mapping[str, float], name: str) -> tuple[list[tuple[str, float]], float]:
    total, rows = 0.0, []
    for bucket in (*map(str, BUCKETS_S), "+Inf"):
        total += values.get(f"{name}:{bucket}", 0.0)
        rows.append((bucket, total))
    return rows, values.get(f"{name}:sum", 0.0)


class Snapshot(Collector):
    """One reading of the hash and the gauges, in Prometheus's terms."""

    def __init__(
        self, values: Mapping[str, float], depth: tuple[int, int], workers: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._values = values
        self._depth = depth
        self._workers = workers

    def collect(self) -> Iterator[Any]:
        """Yield every family."""
        for field, (name, about, label) in COUNTERS.items():
            family = CounterMetricFamily(name, about, labels=[label] if label else [])
            for key, value in sorted(self._values.items()):
                head, _, tail = key.partition("|")
                if head == field and ":" not in key:
                    family.add_metric([tail] if label else [], value)
            yield family
        for field, (name, about) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, about)
            histogram.add_metric([], *_histogram(self._values, field))
            yield histogram
        stages = HistogramMetricFamily("drk_gym_stage_seconds", "Time by stage of an evaluation", labels=["stage"])
        names = {key.partition(":")[0] for key in self._values if key.startswith("stage_s|")}
        for name in sorted(names):
            stages.add_metric([name.partition("|")[2]], *_histogram(self._values, name))
        yield stages
        yield from self._gauges()

    def _gauges(self) -> Iterator[Any]:
        depth = GaugeMetricFamily("drk_gym_jobs", "Jobs not yet finished", labels=["state"])
        depth.add_metric(["waiting"], self._depth[0])
        depth.add_metric(["running"], self._depth[1])
        yield depth
        alive, slots = (
            GaugeMetricFamily("drk_gym_workers", "Workers alive", labels=["device_class"]),
            GaugeMetricFamily("drk_gym_slots", "Evaluations that may run at once", labels=["device_class"]),
        )
        classes = sorted({beat["class"] for beat in self._workers.values()})
        for device_class in classes:
            beats = [beat for beat in self._workers.values() if beat["class"] == device_class]
            alive.add_metric([device_class], len(beats))
            slots.add_metric([device_class], sum(int(beat["slots"]) for beat in beats))
        yield alive
        yield slots


def render(
    values: Mapping[str, str], depth: tuple[int, int], workers: Mapping[str, Mapping[str, str]]
) -> tuple[bytes, str]:
    """Return Prometheus's text and its content type."""
    registry = CollectorRegistry()
    registry.register(Snapshot({key: float(value) for key, value in values.items()}, depth, workers))
    return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"
