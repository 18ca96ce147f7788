"""Error messages for failures of the Hub's client, each with a remedy."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from sametoken import embedded


def failure_of(model: str, revision: str | None, error: Exception) -> str:
    """Error message for an exception of the Hub's client, with a remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    # The order matters: a gated repository is also a RepositoryNotFoundError, a half-downloaded one also a
    # LocalEntryNotFoundError.
    match error:
        case errors.GatedRepoError():
            return (
                f"{model} is gated: visit {page} and request access, then set HF_TOKEN to a token of the account "
                "that was granted it"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{model} was not found: neither a directory here{_nearest(model)} nor a repository on "
                f"{constants.ENDPOINT}; check the spelling, and set HF_TOKEN if it is private"
            )
        case errors.RevisionNotFoundError():
            return f"{model} has no revision {revision!r}; {page}/tree/main lists its branches and tags"
        case errors.IncompleteSnapshotError():
            return (
                f"{model} is only half downloaded and the Hub is out of reach; run again with a connection "
                "(and without HF_HUB_OFFLINE) to complete it"
            )
        case errors.LocalEntryNotFoundError():
            return _unreachable(model, error)
        case errors.HfHubHTTPError():
            return _refused(model, error)
    return (
        f"downloading {model} failed ({type(error).__name__}: {first_line(error)}); check the connection and the "
        f"free space in {constants.HF_HUB_CACHE}, then run again: finished files are kept"
    )


def _unreachable(model: str, error: Exception) -> str:
    """Error message for a model that is not in the cache while the Hub cannot be reached."""
    from huggingface_hub import constants

    cause = error.__cause__
    if isinstance(cause, OSError) and getattr(cause, "response", None) is not None:
        return _refused(model, cause)
    start = f"{model} is neither a directory here{_nearest(model)} nor in the cache {constants.HF_HUB_CACHE}, "
    if cause is None or constants.HF_HUB_OFFLINE:
        return start + "and offline mode excludes the Hub; run once without HF_HUB_OFFLINE, or copy the directory"
    return start + (
        f"and {constants.ENDPOINT} cannot be reached ({type(cause).__name__}: {first_line(cause)}); check the "
        "connection, the proxy and HF_ENDPOINT, or copy the directory"
    )


def _refused(model: str, error: Any) -> str:
    """Error message for an error response of the Hub."""
    status = error.response.status_code
    if status == 401:
        return f"the Hub refused the token for {model} (401); make a new one at https://huggingface.co/settings/tokens"
    return f"the Hub answered {status} for {model} ({first_line(error)}); try again later, or check HF_ENDPOINT"


def _nearest(model: str) -> str:
    """Suggestion for a model that was not found: a model of the package, or a directory; "" for neither."""
    owners = {draft: target for target, known in embedded.TARGETS.items() for draft in known.drafts}
    if model in owners:
        return f" ({model} is a head for {owners[model]!r}; give it as --draft)"
    close = difflib.get_close_matches(model, {**embedded.TARGETS, **owners}, n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}, which sametoken has?)" if close else nearest_directory(Path(model))


def nearest_directory(path: Path) -> str:
    """Text " (nearest: ...)" with the sibling directory whose name is most like that of `path`; "" if none is."""
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    return f" (nearest: {path.parent / close[0]})" if close else ""


def first_line(error: BaseException) -> str:
    """First line of an error's message that is not blank."""
    return next((line for line in str(error).splitlines() if line.strip()), "no details")
