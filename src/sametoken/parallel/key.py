"""Shared secret of the ranks, with proofs of possession that do not transmit it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from sametoken.errors import ConfigError
from sametoken.parallel.place import RankPlace

KEY = "SAMETOKEN_RANK_KEY"  # environment variable, since command lines are public


def own_key(place: RankPlace) -> str:
    """Key of this rank: from the environment, or a new one for a rank 0 that starts the others."""
    stated = os.environ.get(KEY, "")
    return stated or (secrets.token_hex(16) if place.rank == 0 and not place.launcher else "")


def proof(key: str, challenge: str, rank: int) -> str:
    """Proof that a rank has the key, valid for this rank and run only."""
    return hmac.new(key.encode(), f"{challenge}/{rank}".encode(), hashlib.sha256).hexdigest()


def check_proof(key: str, challenge: str, rank: int, found: object) -> None:
    """Raise ConfigError if a rank has another key or none."""
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(), proof(key, challenge, rank).encode()):
        raise ConfigError(
            f"rank {rank} has another {KEY} than this rank, or one of them has none; set it to the same secret for all "
            f"ranks, with mpirun by -x {KEY}, or for none of them"
        )
