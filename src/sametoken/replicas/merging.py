"""Merging of state reports of all replicas: metrics with a label, loads as sums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class ReplicaState(NamedTuple):
    """State of a replica, as recorded by the front.

    Attributes:
        status: "ready", "starting" or "ended".
        restarts: number of restarts since the server started.
        open_sequences: number of sequences for which the front waits.
    """

    number: int
    status: str
    restarts: int
    open_sequences: int


class _Merged(Collector):
    """Collector of the metric families of all processes, each once."""

    def __init__(self, states: Iterable[ReplicaState], texts: Mapping[int, str]) -> None:
        self._families: dict[str, Metric] = {}
        own = CollectorRegistry()
        ProcessCollector(registry=own)
        for family in (*_families_of(states), *own.collect()):
            self._add(family, {} if family.name.startswith("sametoken_") else {LABEL: "front"})
        for number, text in texts.items():
            for family in text_string_to_metric_families(text):
                self._add(family, {LABEL: str(number)})

    def _add(self, family: Metric, label: Mapping[str, str]) -> None:
        kept = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            labels = {**sample.labels, **label}
            if "engine" in labels:  # label of vLLM for its replicas
                labels["engine"] = labels[LABEL]
            kept.samples.append(sample._replace(labels=labels))

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def metrics(states: Iterable[ReplicaState], texts: Mapping[int, str]) -> bytes:
    """Text of metrics for Prometheus.

    Args:
        texts: texts of the replicas' metrics, by number.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(states, texts))
    return generate_latest(registry)


def _families_of(states: Iterable[ReplicaState]) -> list[Metric]:
    up = GaugeMetricFamily("sametoken_replica_up", "1 while the replica takes requests.", labels=[LABEL])
    restarts = CounterMetricFamily("sametoken_replica_restarts", "Times it was started again.", labels=[LABEL])
    opened = GaugeMetricFamily("sametoken_replica_open_sequences", "Sequences sent to it and open.", labels=[LABEL])
    for state in states:
        up.add_metric([str(state.number)], float(state.status == "ready"))
        restarts.add_metric([str(state.number)], state.restarts)
        opened.add_metric([str(state.number)], state.open_sequences)
    return [up, restarts, opened]


def load(texts: Mapping[int, str]) -> dict[str, int]:
    """Number of open requests of all replicas."""
    return {"server_load": sum(json.loads(text)["server_load"] for text in texts.values())}


def server_info(states: Iterable[ReplicaState], texts: Mapping[int, str]) -> dict[str, Any]:
    """Common configuration, totals of all engines, and the state of each."""
    said = {number: json.loads(text) for number, text in texts.items()}
    first = next(iter(said.values()))
    loads = [each["load"] for each in said.values()]
    together = {
        key: max(each[key] for each in loads) if key == "draft_len" else sum(each[key] for each in loads)
        for key, value in first["load"].items()
        if isinstance(value, int | float)
    }
    each = [{**state._asdict(), "load": said.get(state.number, {}).get("load")} for state in states]
    return {**first, "load": {**first["load"], **together}, "replicas": each}
