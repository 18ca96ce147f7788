"""Checks before the start of a Dynamo worker: installed package, reachable services, free port."""

from __future__ import annotations

import importlib.metadata
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from sametoken.errors import ConfigError

OLDEST = (1, 6)  # older versions were not tested
TESTED = "1.6.1"
INSTALL = f"pip install --no-deps ai-dynamo=={TESTED}, then deploy/dynamo/requirements.txt (docs/dynamo.md)"
PATIENCE_S = 2.0
MOST_PORT = 2**15 - 1  # Dynamo stores the number in 16 bits with a sign
DISCOVERY, REQUESTS, EVENTS = ("etcd", "file", "mem", "kubernetes"), ("tcp", "nats"), ("nats", "zmq")


class Address(NamedTuple):
    """Address of a worker for the frontend: Dynamo's three names."""

    namespace: str
    component: str
    endpoint: str

    @classmethod
    def of(cls, environ: Mapping[str, str], namespace: str | None, endpoint: str | None) -> Address:
        """Address from the options, else from Dynamo's variables, else from its defaults.

        Raises:
            ConfigError: the endpoint is malformed, or names another namespace.
        """
        stated = endpoint or environ.get("DYN_ENDPOINT")
        if stated is None:
            return cls(namespace or environ.get("DYN_NAMESPACE") or "dynamo", "backend", "generate")
        parts = re.fullmatch(r"(?:dyn://)?([\w-]+)\.([\w-]+)\.([\w-]+)", stated)
        if parts is None:
            raise ConfigError(f"--endpoint is {stated!r}, expected dyn://NAMESPACE.COMPONENT.ENDPOINT")
        if namespace not in (None, parts[1]):
            raise ConfigError(f"--namespace is {namespace} and --endpoint {stated}; leave one of them out")
        return cls(*parts.groups())


class Planes(NamedTuple):
    """Services by which workers and frontend communicate.

    Attributes:
        discovery: service for discovery, one of `DISCOVERY`.
        requests: service for requests, one of `REQUESTS`.
        events: service for KV events, one of `EVENTS`.
    """

    discovery: str
    requests: str
    events: str


def planes_of(environ: Mapping[str, str], discovery: str | None, requests: str | None, events: str | None) -> Planes:
    """Services from the options, else from Dynamo's variables, else from its defaults.

    Raises:
        ConfigError: a value is not one of Dynamo's.
    """
    found = Planes(
        discovery or environ.get("DYN_DISCOVERY_BACKEND") or "etcd",
        requests or environ.get("DYN_REQUEST_PLANE") or "tcp",
        events or environ.get("DYN_EVENT_PLANE") or "zmq",
    )
    names = ("discovery-backend", "request-plane", "event-plane")
    for name, value, known in zip(names, found, (DISCOVERY, REQUESTS, EVENTS), strict=True):
        if value not in known:
            raise ConfigError(f"--{name} is {value!r}, expected one of {', '.join(known)}")
    return found


def check(planes: Planes, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for settings with which the worker would fail later, or wait forever.

    Raises:
        ConfigError: ai-dynamo is missing or too old, a service cannot be reached, or the system port is in use.
    """
    check_package()
    if planes.discovery == "etcd":
        addresses = environ.get("ETCD_ENDPOINTS") or "http://localhost:2379"
        _check_service("etcd", addresses, 2379, "ETCD_ENDPOINTS", "--discovery-backend file, which needs none")
    if "nats" in (planes.requests, planes.events):
        instead = "--request-plane tcp --event-plane zmq, which need none"
        _check_service("NATS", environ.get("NATS_SERVER") or "nats://localhost:4222", 4222, "NATS_SERVER", instead)
    check_port(environ)


def check_package() -> None:
    """Raise ConfigError unless ai-dynamo is installed and new enough."""
    try:
        version = importlib.metadata.version("ai-dynamo")
        importlib.metadata.version("ai-dynamo-runtime")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"a Dynamo worker needs {error.name}, which is not installed: {INSTALL}") from None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"ai-dynamo is {version}, a worker needs {oldest} or newer: {INSTALL}")


def check_port(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the port of health and metrics is in use."""
    stated = environ.get("DYN_SYSTEM_PORT", "")
    if not stated or stated.startswith("-"):
        return
    if not (stated.isascii() and stated.isdigit() and int(stated) <= MOST_PORT):
        raise ConfigError(f"DYN_SYSTEM_PORT is {stated!r}, expected 0 to {MOST_PORT}, the range of Dynamo")
    host = environ.get("DYN_SYSTEM_HOST") or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(stated)))
        except OSError as error:
            words = f"DYN_SYSTEM_PORT={stated} on {host} cannot be used: {error.strerror}; set another port"
            raise ConfigError(words) from error


def _check_service(name: str, addresses: str, port: int, variable: str, instead: str) -> None:
    """Raise ConfigError unless one of the addresses of a service accepts a connection."""
    reason = ""
    for address in addresses.split(","):
        parts = urlsplit(address.strip() if "//" in address else f"//{address.strip()}")
        try:
            with socket.create_connection((parts.hostname or "localhost", parts.port or port), PATIENCE_S):
                return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        f"{name} does not answer at {addresses}: {reason}; start it, set {variable} to where it runs, or take {instead}"
    )
