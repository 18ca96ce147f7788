"""The secret by which ranks know each other: each proves that it has it, and nobody sends it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from sametoken.errors import ConfigError
from sametoken.parallel.place import RankPlace

KEY = "SAMETOKEN_RANK_KEY"  # in the environment of a rank, never on its command line


def own_key(place: RankPlace) -> str:
    """The key of this rank: the one of its environment, or, as rank 0 that starts the others itself, a new one."""
    stated = os.environ.get(KEY, "")
    return stated or (secrets.token_hex(16) if place.rank == 0 and not place.launcher else "")


def proof(key: str, challenge: str, rank: int) -> str:
    """That a rank has the key: nobody without it can answer for this rank in this run."""
    return hmac.new(key.encode(), f"{challenge}/{rank}".encode(), hashlib.sha256).hexdigest()


def check_proof(key: str, challenge: str, rank: int, found: object) -> None:
    """Raise ConfigError where a rank has another key or none."""
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(), proof(key, challenge, rank).encode()):
        raise ConfigError(
            f"rank {rank} has another {KEY} than this rank, or one of them has none; set it to the same secret for all "
            f"ranks, with mpirun by -x {KEY}, or for none of them"
        )
