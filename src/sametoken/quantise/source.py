"""Plain checkpoint, read one block at a time: tensors by block, and modules with their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import read_config, read_json, stored_scheme
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.tensors import Stored, tensor_names, weight_files
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.model.block import Block
from sametoken.model.config import ModelConfig
from sametoken.model.linear import Linear

OUTER = -1  # number that stands for embeddings, last norm and lm_head


class PlainCheckpoint:
    """Directory of a plain checkpoint.

    Attributes:
        directory: path.
        config: configuration of the model.
        stated: content of config.json.
        dtype: data type of the computation: bfloat16 if the checkpoint has it, else float32.
        size: bytes of the weight files.
        rules: mapping of tensor names.

    Raises:
        UnsupportedModelError: the weights are already quantised or not in safetensors, or the architecture is not
            supported.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.config = directory, ModelConfig.from_hf(read_config(directory))
        self.stated = read_json(directory / "config.json") or {}
        if (scheme := stored_scheme(directory)) is not None:
            raise UnsupportedModelError(
                f"{directory} is quantised already ({scheme.name}); expected plain weights, give the checkpoint that "
                "it was made from"
            )
        if not self.config.usual_attention or self.config.logits_cap is not None:
            raise UnsupportedModelError(f"{directory}: {self.config.architecture} cannot be quantised yet")
        files = weight_files(directory)
        if other := [file.name for file in files if file.suffix != ".safetensors"]:
            raise UnsupportedModelError(f"{directory} has its weights in {other[0]}, expected safetensors; convert it")
        self.size = sum(file.stat().st_size for file in files)
        self.rules = rules_for(self.config)
        self.dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        self._names: dict[int, list[tuple[str, Path]]] = defaultdict(list)
        for file in files:
            for name in tensor_names(file):
                self._names[self._block(name)].append((name, file))

    def _block(self, name: str) -> int:
        place = self.rules.place(name)
        if place is None and not self.rules.ignores(name):
            raise CheckpointError(f"{self.directory}: {name} is no weight of a {self.config.architecture}")
        unread = place is None or self.rules.ignores(name)  # for example MTP blocks
        parts = ["outer"] if unread or place is None else place.parameter.split(".")
        return int(parts[1]) if parts[0] == "blocks" else OUTER

    def stored(self, block: int) -> Iterator[Stored]:
        """Tensors of a block, or of `OUTER`, as stored."""
        for name, file in self._names[block]:
            with safe_open(file, framework="pt") as opened:
                yield Stored(name, opened.get_tensor(name), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name."""
        found = {}
        for name, file in (each for names in self._names.values() for each in names):
            with safe_open(file, framework="pt") as opened:
                found[name] = tuple(opened.get_slice(name).get_shape())
        return found

    def block(self, number: int, stored: Sequence[Stored]) -> Block:
        """Block with its weights, neither quantised nor packed."""
        with torch.device("meta"):
            block = Block(self.config, number, self.dtype, None)
            holder = nn.Module()
            holder.blocks = nn.ModuleDict({str(number): block})
        load_parameters(holder, stored, self.rules, self.dtype, "cpu", pack=False)
        for module in block.modules():
            if isinstance(module, Linear):
                module.deterministic = False  # faster; bits are not compared here
        return block

    def outer(self, name: str) -> Tensor:
        """Parameter outside the blocks, for example "embed.weight"."""
        for item in self.stored(OUTER):
            place = self.rules.place(item.name)
            if place is not None and place.parameter == name and not self.rules.ignores(item.name):
                return item.tensor.to(self.dtype)
        raise CheckpointError(f"{self.directory} has no tensor for {name}; download it again")
