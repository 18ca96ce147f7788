"""A checkpoint as GGUF, run in an interpreter that has llama.cpp's converter's needs.

    python gguf_convert.py LLAMA_CPP_DIR MODEL OUT.gguf [the converter's own options; default --outtype bf16]

The converter knows tokenizers by a list of hashes. Here prompts and outputs are token ids, so the vocabulary is written
as placeholders, and none of them ends a generation: every engine runs to the same length.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def set_placeholders(self: Any) -> None:
    """Replaces the converter's `set_vocab`."""
    import gguf

    count = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list([f"<unk{i}>" if i == 0 else f"t{i}." for i in range(count)])
    self.gguf_writer.add_token_scores([0.0] * count)
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.NORMAL] * (count - 1)
    self.gguf_writer.add_token_types(kinds)
    # Token 0 is <unk>, which a model does not say; llama.cpp would take token 2 for the end if none were named.
    self.gguf_writer.add_eos_token_id(0)
    self.gguf_writer.add_add_bos_token(False)


def main() -> None:
    llama_cpp, model, out, *options = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    sys.path.insert(0, str(llama_cpp))
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase

    name = get_model_architecture(ModelBase.load_hparams(Path(model), False), ModelType.TEXT)
    get_model_class(name).set_vocab = set_placeholders
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, *(options or ["--outtype", "bf16"])]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
