"""The files under deploy/ as data: what the dashboard and the alerts ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "sametoken.json").read_text(encoding="utf-8"))
NAME = re.compile(r"\bsametoken_\w+")


class Asked(NamedTuple):
    """An expression and where it stands."""

    place: str
    expression: str

    @property
    def names(self) -> set[str]:
        """The metrics in it."""
        return set(NAME.findall(self.expression))


def panels() -> list[dict[str, Any]]:
    """Every panel that shows something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def shown() -> list[Asked]:
    """What the panels ask for."""
    return [Asked(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def variables() -> list[Asked]:
    """What the variables of the dashboard are filled with."""
    return [Asked(each["name"], each["definition"]) for each in DASHBOARD["templating"]["list"] if "definition" in each]


def alerts() -> list[dict[str, Any]]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def asked() -> Iterator[Asked]:
    """Every expression under deploy/."""
    yield from shown()
    yield from variables()
    yield from (Asked(rule["alert"], rule["expr"]) for rule in alerts())
