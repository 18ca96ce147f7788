"""A model's name into a directory on disk and its config.json; the only room that knows transformers and the Hub.

Both libraries are imported inside functions: `import transformers` alone costs more than a second.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.checkpoint.objects import json_object
from sametoken.checkpoint.paths import user_path
from sametoken.errors import CheckpointError, HubError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
)
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt")
# Copies of the weights in other layouts, which many repositories carry in subdirectories or beside the first.
NOT_NEEDED = ("*/*.json", "*/*.model", "*/*.safetensors", "*/*.bin", "*/tokenizer*", "consolidated*")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(
    model: str, revision: str | None = None, *, token: str | None = None, offline: bool = False, quiet: bool = False
) -> Path:
    """The directory of a model: a local one as it is, anything else downloaded from the Hub into its cache.

    Downloads only configuration, tokenizer and one set of weights, with progress on stderr; files that are already
    in the cache are not fetched again, and an interrupted file is resumed or fetched anew.

    Args:
        model: a directory, or a Hub id such as "Qwen/Qwen3-0.6B".
        revision: branch, tag or commit of the Hub repository; by default its main branch.
        token: access token; by default HF_TOKEN or the stored login.
        offline: use the cache only; HF_HUB_OFFLINE=1 has the same effect.
        quiet: show no progress.

    Raises:
        CheckpointError: `model` is written as a path and is not a readable directory.
        HubError: the repository is unknown, closed, out of reach or not wholly in the cache.
    """
    path = user_path(model)
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{model} is a file, expected a directory with config.json and weights")
    except OSError as error:
        raise CheckpointError(f"{model} cannot be read ({error.strerror}); check its permissions") from error
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(f"there is no directory {model}{_nearest(path)}; expected one, or a Hub id (owner/name)")

    def fetch(patterns: tuple[str, ...]) -> Path:
        return _download(model, revision, patterns, token=token, offline=offline, quiet=quiet)

    directory = fetch(SMALL_FILES + SAFETENSORS)
    if not any(directory.glob("*.safetensors")):
        directory = fetch(SMALL_FILES + PICKLED)
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Raises:
        CheckpointError: it is missing, unreadable or not a JSON object.
        UnsupportedModelError: its architectures are given and none is a causal language model.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}{_nearest(directory)}")
    config = read_json(directory / "config.json")
    if config is None:
        raise CheckpointError(
            f"{directory} has no config.json (found {contents(directory)}); expected a Hugging Face checkpoint"
        )
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(
            f"{directory}: architectures in config.json is {architectures!r}, expected a list of names"
        )
    if architectures and not any(name.endswith("CausalLM") for name in architectures):
        raise UnsupportedModelError(
            f"{directory}: the architecture is {', '.join(architectures)}, expected a causal language model "
            "(a name that ends in CausalLM); choose a model for text generation"
        )
    return config


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file, `None` if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    try:
        return json_object(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {error}; download it again") from error


def contents(directory: Path) -> str:
    """The first names in a directory, as words for an error."""
    try:
        return ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
    except OSError as error:
        return f"nothing readable: {error.strerror}"


def transformers_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory as transformers builds it, for the layouts that only transformers can read.

    Raises:
        CheckpointError: there are no tokenizer files, or transformers cannot read them.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # its readers raise whatever their parsers raise
        raise CheckpointError(
            f"{directory}: transformers cannot load the tokenizer ({type(error).__name__}: {_first_line(error)}); "
            "expected tokenizer.json or tokenizer.model beside config.json"
        ) from error


def _download(
    model: str, revision: str | None, patterns: tuple[str, ...], *, token: str | None, offline: bool, quiet: bool
) -> Path:
    """A snapshot of the files of a Hub repository that match `patterns`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                token=token,
                local_files_only=offline,
                allow_patterns=list(patterns),
                ignore_patterns=list(NOT_NEEDED),
                tqdm_class=Hidden if quiet else tqdm,
            )
        )
    except Exception as error:  # network, disk and protocol errors come from several libraries; all become words
        raise HubError(_in_words(model, revision, error)) from error


def _in_words(model: str, revision: str | None, error: Exception) -> str:
    """What the Hub client's error means for the user, and what to do."""
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
                f"{model} was not found: neither a directory here{_nearest(Path(model))} nor a repository on "
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
        f"downloading {model} failed ({type(error).__name__}: {_first_line(error)}); check the connection and the "
        f"free space in {constants.HF_HUB_CACHE}, then run again: finished files are kept"
    )


def _unreachable(model: str, error: Exception) -> str:
    """Words for a model that is not in the cache while the Hub cannot be asked."""
    from huggingface_hub import constants

    cause = error.__cause__
    if isinstance(cause, OSError) and getattr(cause, "response", None) is not None:
        return _refused(model, cause)
    start = f"{model} is neither a directory here{_nearest(Path(model))} nor in the cache {constants.HF_HUB_CACHE}, "
    if cause is None or constants.HF_HUB_OFFLINE:
        return start + "and offline mode forbids asking the Hub; run once without HF_HUB_OFFLINE, or copy the directory"
    return start + (
        f"and {constants.ENDPOINT} cannot be reached ({type(cause).__name__}: {_first_line(cause)}); check the "
        "connection, the proxy and HF_ENDPOINT, or copy the directory"
    )


def _refused(model: str, error: Any) -> str:
    """Words for an answer of the Hub that is an error."""
    status = error.response.status_code
    if status == 401:
        return f"the Hub refused the token for {model} (401); make a new one at https://huggingface.co/settings/tokens"
    return f"the Hub answered {status} for {model} ({_first_line(error)}); try again later, or check HF_ENDPOINT"


def _nearest(path: Path) -> str:
    """ " (nearest: ...)" with the directory beside `path` whose name is most like its own, if one is."""
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    return f" (nearest: {path.parent / close[0]})" if close else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no details")
