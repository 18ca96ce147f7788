"""Directory of prepared samples: token ids, loss masks, and optionally a draft vocabulary and hidden states.

manifest.json has the origin and the stamps of the files, which are samples.safetensors and vocabulary.safetensors. A
directory without a manifest is not prepared. Legend: S tokens of a sample, T of all, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.paths import user_path
from sametoken.errors import DataError
from sametoken.files import PREPARE_AGAIN, Stamp, dataclass_of, read_object, read_tensors
from sametoken.learning.target import Features
from sametoken.train.dataset.hidden_states import DIRECTORY, HiddenStates, StoredStates
from sametoken.train.dataset.hidden_states import MANIFEST as HIDDEN_MANIFEST
from sametoken.train.dataset.vocabulary import DraftVocabulary

FORMAT = 1
MANIFEST, SAMPLES, VOCABULARY = "manifest.json", "samples.safetensors", "vocabulary.safetensors"


class Sample(NamedTuple):
    """Tokens of a sample with their loss mask.

    Attributes:
        tokens: int64 [S].
        mask: bool [S], True for tokens that are predicted.
    """

    id: str
    tokens: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Origin:
    """Sources and settings of samples; equal origins give equal samples.

    Attributes:
        target: name of the model.
        target_digest: `checkpoint.identity.model_digest` of the model.
        tokenizer_digest: digest of the tokenizer and the chat template.
        data_sha256: digest of the concatenated files of conversations.
        vocab_size: V, rows of the target's embedding.
        max_len: most tokens of a sample.
        end_of_turn: true if end tokens of answers count.
        all_tokens: true if every token counts.
        template: further variables of the chat template.
        draft_vocab_size: size of the draft vocabulary, None for none.
        fill_vocabulary: true if it was filled up with tokens that do not occur.
        exclude_sha256: digest of the file of held-out prompts, None for none.
    """

    target: str
    target_digest: str
    tokenizer_digest: str
    data_sha256: str
    vocab_size: int
    max_len: int = 2048
    end_of_turn: bool = True
    all_tokens: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    draft_vocab_size: int | None = None
    fill_vocabulary: bool = False
    exclude_sha256: str | None = None


@dataclass(frozen=True)
class Counts:
    """Statistics of a preparation.

    Attributes:
        samples, tokens: number of samples and tokens.
        masked: number of tokens that count in the loss.
        truncated: number of samples cut at `max_len`.
        dropped: number of these samples without a token that counts.
        unserved: samples whose last prompt a server would render differently, see `masks.Masked.as_served`.
        unended: samples with an answer without end token, see `masks.Masked.ended`.
        distinct: number of distinct token ids that count.
        coverage: share of the masked tokens in the draft vocabulary, None without one.
        excluded: number of conversations that were left out, because they share text with held-out prompts.
    """

    samples: int
    tokens: int
    masked: int
    truncated: int
    dropped: int
    unserved: int
    unended: int
    distinct: int
    coverage: float | None = None
    excluded: int = 0


@dataclass(frozen=True)
class Manifest:
    """Contents of a directory of prepared samples.

    Attributes:
        files: stamp of each file.
        taps, hidden_dtype: taps and dtype of stored hidden states, None if there are none.
    """

    format: int
    origin: Origin
    counts: Counts
    files: Mapping[str, Stamp]
    taps: tuple[int, ...] | None = None
    hidden_dtype: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Content of manifest.json, without hidden states, which have their own manifest."""
        stamps = {name: stamp._asdict() for name, stamp in self.files.items()}
        return {
            "format": self.format, "origin": asdict(self.origin), "counts": asdict(self.counts), "files": stamps
        }  # fmt: skip


class Prepared:
    """Sequence of prepared samples, written by `preparation.prepare`.

    Attributes:
        directory: directory of the samples.
        manifest: content of the directory.
        draft_vocabulary: draft vocabulary, None if there is none.
        hidden_states: hidden states, None if there are none; shards may be missing during extraction.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        stored = read_tensors(directory / SAMPLES, manifest.files[SAMPLES])
        self._tokens, self._mask = stored["tokens"], stored["mask"]
        self._starts: list[int] = [0, *stored["ends"].tolist()]
        self._ids: list[str] = json.loads(stored["ids"].numpy().tobytes())
        self.draft_vocabulary: DraftVocabulary | None = None
        if VOCABULARY in manifest.files:
            self.draft_vocabulary = DraftVocabulary(**read_tensors(directory / VOCABULARY, manifest.files[VOCABULARY]))
        stored_states = HiddenStates.open(directory / DIRECTORY, self.lengths())
        self.hidden_states: StoredStates | None = stored_states
        if stored_states is not None:
            spec = stored_states.spec
            manifest = replace(manifest, taps=spec.taps, hidden_dtype=spec.dtype)
            if spec.samples_sha256 != manifest.files[SAMPLES].sha256:
                raise DataError(
                    f"{directory / DIRECTORY / HIDDEN_MANIFEST}: found hidden states of samples "
                    f"{spec.samples_sha256[:16]}..., expected {manifest.files[SAMPLES].sha256[:16]}...; delete "
                    f"{directory / DIRECTORY} to make them anew"
                )
        self.manifest = manifest

    @classmethod
    def open(cls, directory: str | Path) -> Prepared:
        """Open the samples in a directory.

        Raises:
            DataError: the directory was not prepared, or a file is missing, damaged or of another version.
        """
        path = user_path(directory)
        return cls(path, read_manifest(path))

    def __len__(self) -> int:
        return len(self._ids)

    def lengths(self) -> list[int]:
        """Number of tokens of each sample."""
        return [stop - start for start, stop in pairwise(self._starts)]

    def __getitem__(self, sample: int) -> Sample:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample}, expected 0 to {len(self) - 1}")
        part = slice(self._starts[sample], self._starts[sample + 1])
        return Sample(self._ids[sample], self._tokens[part].to(torch.int64), self._mask[part])

    def features(self, sample: int) -> Features | None:
        """Hidden states of a sample, None if they are not stored.

        Raises:
            DataError: the shard of the sample is missing or damaged.
        """
        return None if self.hidden_states is None else self.hidden_states[sample]

    def check_target(self, directory: Path) -> None:
        """Raise if the samples were prepared for another target.

        Args:
            directory: checkpoint of the target.

        Raises:
            DataError: the targets differ.
        """
        found, expected = model_digest(directory), self.manifest.origin.target_digest
        if found != expected:
            raise DataError(
                f"{self.directory / MANIFEST}: prepared for {self.manifest.origin.target} ({expected[:16]}...), found "
                f"{directory} ({found[:16]}...); prepare the data again for this target"
            )


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a prepared directory.

    Raises:
        DataError: the manifest is missing, damaged or of another version.
    """
    file = directory / MANIFEST
    found = read_object(file)
    if found.get("format") != FORMAT:
        raise DataError(f"{file}: format {found.get('format')!r}, expected {FORMAT}; {PREPARE_AGAIN}")
    try:
        stamps = {SAMPLES: found["files"][SAMPLES], **found["files"]}
        stamps = {name: Stamp(**stamp) for name, stamp in stamps.items()}
        origin, counts = dataclass_of(Origin, found["origin"]), dataclass_of(Counts, found["counts"])
        if (VOCABULARY in stamps) != (origin.draft_vocab_size is not None):
            raise TypeError(f"draft_vocab_size is {origin.draft_vocab_size}, the files are {', '.join(stamps)}")  # noqa: TRY301
        return Manifest(FORMAT, origin, counts, stamps)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: not a manifest of prepared samples ({error}); {PREPARE_AGAIN}") from error


def check_origin(directory: Path, wanted: Origin) -> Manifest:
    """Read the manifest of a directory and check its origin.

    Raises:
        DataError: the origins differ; the message has the first difference.
    """
    manifest = read_manifest(directory)
    for name in (each.name for each in fields(Origin) if each.name != "target"):  # a name may change, a model may not
        found, expected = getattr(manifest.origin, name), getattr(wanted, name)
        if found != expected:
            raise DataError(
                f"{directory / MANIFEST}: found {name} {found}, expected {expected}; choose another --output, delete "
                "it, or run with what made it"
            )
    return manifest
