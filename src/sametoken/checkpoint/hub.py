"""Resolution of a model's name to a directory on disk, and its config.json.

Transformers and the Hub's client are imported inside functions: `import transformers` takes more than a second.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.checkpoint.contents import of_directory, of_file, of_names
from sametoken.checkpoint.gguf.parts import chosen_files, is_model, models
from sametoken.checkpoint.hub_failures import failure_of, first_line, nearest_directory
from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.quantised.scheme import KEYS, Scheme, read_scheme
from sametoken.embedded import PublishedFile, published
from sametoken.errors import CheckpointError, ConfigError, HubError, UnsupportedModelError, shown
from sametoken.files import json_object
from sametoken.kinds import states_head
from sametoken.model.families import FAMILIES
from sametoken.model.unsupported import refused_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("sametoken")
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "modules.json",
    "*_Pooling/config.json",
)
CODE_FILES = ("tokenizer_config.json", "config.json")  # in which auto_map names Python code of the checkpoint
QUANTISED = "hf_quant_config.json"  # Model-Optimizer's file with the format of the weights
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt")
# Copies of weights and tokenizers in other layouts, which many repositories have in subdirectories or at the top.
NOT_NEEDED = (
    "*/*.index.json",
    "tokenizer*/*",
    "*/*.model",
    "*/*.safetensors",
    "*/*.bin",
    "*/tokenizer*",
    "consolidated*",
    "adapter_*",
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+(:[\w./-]+)?)?")
GGUF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+:[\w./-]+")  # with the quantisation type or the name of a file


def resolve(
    model: str | Path,
    revision: str | None = None,
    *,
    check: Callable[[Path], object] = lambda directory: None,
    weights: bool = True,
    index: bool = False,
    token: str | None = None,
    offline: bool = False,
    quiet: bool = False,
) -> Path:
    """Return the directory of a model: a local one as it is, otherwise downloaded from the Hub into its cache.

    Configuration, tokenizer and one set of weights are downloaded, with progress on stderr. Cached files are not
    downloaded again; an interrupted file is resumed or downloaded anew. Weights come last, after `check` and a
    comparison of their sizes with the free space.

    Args:
        model: directory, GGUF file, Hub id such as "Qwen/Qwen3-0.6B", or Hub id with the quantisation type of a GGUF
            file, such as "Qwen/Qwen3-0.6B-GGUF:Q8_0"; without a type, the usual one of a repository of GGUF files.
            Or the name of a published file, see `sametoken.embedded`.
        revision: branch, tag or commit of the Hub repository; None for its main branch.
        check: called with the directory of configuration and tokenizer if weights are to be downloaded; its errors end
            the download.
        weights: false to leave out the weights.
        index: true to include the index of the weights' tensors.
        token: access token; None for HF_TOKEN or the stored login.
        offline: true to use the cache only, as HF_HUB_OFFLINE=1 does.
        quiet: true to show no progress.

    Raises:
        CheckpointError: `model` is a path but not a readable directory, or has no weights.
        UnsupportedModelError: the content of a GGUF file is not supported.
        HubError: the repository is unknown, closed, unreachable, partly cached, or larger than the free space.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        raise CheckpointError(f"the model is {shown(model)}, expected a directory or a Hub id (owner/name)")
    if isinstance(model, str) and (known := published(model)) is not None:
        return _opened(_named(model, known, offline))
    path = user_path(model)
    try:
        if path.is_dir():
            return _only_file(path)
        if path.is_file() and path.suffix.lower() == ".gguf":
            return _opened(path)
        if path.is_file():
            raise CheckpointError(f"{model} is a file, expected a directory: {of_file(path)}")
        if path.exists():
            raise CheckpointError(f"{model} is neither a file nor a directory; expected a checkpoint")
        if path.suffix.lower() == ".gguf" and not GGUF_ID.fullmatch(str(model)):
            raise CheckpointError(f"there is no file {model}; expected the path of a GGUF file")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{shown(str(model))} cannot be read ({reason}); check name and permissions") from error
    if not HUB_ID.fullmatch(str(model)):
        raise CheckpointError(
            f"there is no directory {model}{nearest_directory(path)}; expected one, or a Hub id (owner/name)"
        )
    model, _, kind = str(model).partition(":")

    def fetch(patterns: tuple[str, ...]) -> Path:
        return _download(model, revision, patterns, token=token, offline=offline, quiet=quiet)

    if kind:
        sizes = None if offline else _listed(model, revision, token)
        if sizes is None:  # only the cache is available
            cached = fetch(SMALL_FILES)
            sizes = _cached(cached)
        return _published(model, kind, sizes, fetch)
    directory = fetch(SMALL_FILES + (SAFETENSORS[1:] if index else ()))
    if not weights:
        return directory
    listed = None if offline else _listed(model, directory.name, token)
    if listed is None:  # only the cache is available
        directory = fetch(SMALL_FILES + SAFETENSORS)
        if any(directory.glob("*.safetensors")):
            return directory
        directory = fetch(SMALL_FILES + PICKLED)
        pickled = any(True for pattern in PICKLED for _ in directory.glob(pattern))
        return directory if pickled or not _cached(directory) else _published(model, "", _cached(directory), fetch)
    wanted = SAFETENSORS if _matching(listed, ("*.safetensors",)) else PICKLED
    sizes = _matching(listed, wanted)
    if not sizes and any(map(is_model, listed)):
        return _published(model, "", listed, fetch)
    if not sizes or not (directory / "config.json").exists():
        what = "config.json" if sizes else "weights that can be read"
        raise CheckpointError(f"{model} has no {what}: {of_names(name for name in listed if '/' not in name)}")
    left = sum(size for name, size in sizes.items() if not (directory / name).exists())
    if left:
        check(directory)
        _check_space(model, left)
    return fetch(SMALL_FILES + wanted)


def _only_file(directory: Path) -> Path:
    """Directory itself, or the directory that stands for its only GGUF model if it has no config.json."""
    if (directory / "config.json").exists():
        return directory
    found = models(file.name for file in directory.iterdir() if file.suffix.lower() == ".gguf")
    return _opened(directory / next(iter(found.values()))[0]) if len(found) == 1 else directory


def _published(model: str, kind: str, sizes: Mapping[str, int], fetch: Callable[[tuple[str, ...]], Path]) -> Path:
    """Directory that stands for the GGUF file of a quantisation type; "" is the usual type."""
    files = chosen_files(model, kind, sizes)
    if not kind:
        LOG.info(f"{model} holds weights in GGUF: {files[0]} is taken; name another kind after a colon")
    _check_space(model, sum(sizes[file] for file in files))
    return _opened(fetch(tuple(files)) / files[0])


def _named(model: str, known: PublishedFile, offline: bool) -> Path:
    """The GGUF file of a named model, next to the Hub's cache."""
    from huggingface_hub import constants

    from sametoken.checkpoint.named import file_of

    models = cache_directory().parent / "sametoken" / "models"
    return file_of(model, known, models, _check_space, offline=offline or constants.HF_HUB_OFFLINE)


def _opened(file: Path) -> Path:
    """Directory that stands for a GGUF file."""
    from sametoken.checkpoint.gguf.directory import directory_of

    return directory_of(file, opened_directory())


def _cached(directory: Path) -> dict[str, int]:
    """GGUF files of a cached snapshot, each with 0 bytes to download."""
    return {file.relative_to(directory).as_posix(): 0 for file in directory.rglob("*.gguf")}


def _matching(listed: dict[str, int], patterns: Iterable[str]) -> dict[str, int]:
    """Files that match a pattern, without copies of the weights in other layouts."""
    return {
        name: size
        for name, size in listed.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in NOT_NEEDED)
    }


def _listed(model: str, commit: str | None, token: str | None) -> dict[str, int] | None:
    """Names and sizes in bytes of all files of a Hub repository; None if the Hub does not list them."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        tree = HfApi(token=token).list_repo_tree(model, revision=commit)
        return {entry.path: int(entry.size or 0) for entry in tree if isinstance(entry, RepoFile)}
    except Exception:  # offline, broken connections and refusals: the download that follows raises the error
        return None


def _check_space(model: str, needed: int) -> None:
    """Raise HubError if a download is larger than the free space on the disk of the cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    place = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"the weights of {model} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {cache}; make "
            "room, or set HF_HOME to a directory on a larger disk"
        )


def cache_directory() -> Path:
    """Directory of the Hub's models, which may not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def opened_directory() -> Path:
    """Parent of the directories that stand for GGUF files."""
    return cache_directory().parent / "sametoken" / "gguf"


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json of a supported model, without the quantisation scheme, which `stored_scheme` reads.

    Raises:
        CheckpointError: config.json is missing, unreadable or not a JSON object, or belongs to a head.
        UnsupportedModelError: the architecture or the format of the weights is not implemented.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}{nearest_directory(directory)}")
    config = read_json(directory / "config.json")
    if config is None:
        raise CheckpointError(f"{directory} has no config.json: {of_directory(directory)}")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{directory}: architectures in config.json is {shown(names)}, expected a list of names")
    if states_head(config) and not any(name in FAMILIES for name in names):
        raise CheckpointError(
            f"{directory} holds a head ({', '.join(names) or 'by its config.json'}), expected a whole model; give the "
            "head as --draft, and as MODEL the target that it was trained for"
        )
    reason = refused_architecture(config, FAMILIES) if names else None
    if reason:
        raise UnsupportedModelError(f"{directory}: {reason}")
    stored_scheme(directory)
    return {key: value for key, value in config.items() if key not in KEYS}


def stored_scheme(directory: Path) -> Scheme | None:
    """Quantisation scheme that a checkpoint directory states, None if its weights are not quantised.

    Raises:
        CheckpointError: the scheme is malformed.
        UnsupportedModelError: weights of this format are not supported.
    """
    try:
        return read_scheme(read_json(directory / "config.json") or {}, read_json(directory / QUANTISED))
    except CheckpointError as error:
        raise type(error)(str(error), field=str(directory)) from error


def read_json(file: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; None if there is no such file.

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


def transformers_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a directory with transformers, for layouts that only transformers reads.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: there are no tokenizer files, or transformers cannot read them.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"{directory}: only transformers reads this family's tokenizer, and it is not installed; run: "
            "pip install 'sametoken[transformers]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its readers pass on the errors of their parsers
        file = next((file for file in CODE_FILES if "auto_map" in (read_json(directory / file) or {})), None)
        if file is not None:
            raise CheckpointError(
                f"{directory / file}: auto_map names Python code for the tokenizer, which is never run; expected a "
                "tokenizer.json of a class of transformers: remove auto_map and tokenizer_class if there is one"
            ) from error
        raise CheckpointError(
            f"{directory}: transformers cannot load the tokenizer ({type(error).__name__}: {first_line(error)}); "
            "expected tokenizer.json or tokenizer.model beside config.json"
        ) from error


def _download(
    model: str, revision: str | None, patterns: tuple[str, ...], *, token: str | None, offline: bool, quiet: bool
) -> Path:
    """Download the files of a Hub repository that match `patterns`; return the snapshot's directory."""
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
    except Exception as error:  # network, disk and protocol errors, from several libraries
        raise HubError(failure_of(model, revision, error)) from error
