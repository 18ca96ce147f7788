"""A server as its clients' tests see it, where `make clients` puts the clients, and what several of them ask."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
HOME = HERE.parents[1] / ".clients"  # what `make clients` installs
PYTHON = HOME / "python" / "bin"
PATIENCE_S = 300  # the first import of what was just installed may take minutes where the disk is slow

MESSAGES = [{"role": "user", "content": "What do you like to do for fun?"}]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 40}
FORMED = {**SAMPLED, "max_tokens": 200}  # enough for any text of the form below
CITIES = ["Oslo", "Lima"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Served:
    """A server, and ways to ask it that do not go through the client under test."""

    url: str
    model: str
    directory: str  # of the target, for clients that tokenize

    def curl(self, path: str, **body: Any) -> Any:
        """The reply to a POST of `body`, by curl."""
        command = ["curl", "--silent", "--show-error", "--max-time", str(PATIENCE_S), "--data-binary", "@-"]
        command += ["--header", "Content-Type: application/json"]
        given = json.dumps({"model": self.model, **body})
        done = subprocess.run([*command, self.url + path], input=given, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def counts(self) -> dict[str, float]:
        """Our samples of /metrics as `name`, or as `name{value,...}` with the values of labels but the model's."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as reply:
            told = reply.read().decode()
        samples = (sample for family in text_string_to_metric_families(told) for sample in family.samples)
        found = {}
        for name, labels, value, *_ in samples:
            own = ",".join(value for label, value in labels.items() if label != "model_name")
            found[name + (f"{{{own}}}" if own else "")] = value
        return found


def said(*command: str | Path, cwd: Path = HERE, **environment: str) -> str:
    """What a client's program prints; where it fails, what it complains about is in the error."""
    words, known = [str(word) for word in command], os.environ | environment
    done = subprocess.run(words, cwd=cwd, env=known, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
