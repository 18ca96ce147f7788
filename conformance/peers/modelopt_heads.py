"""Runs in ModelOpt's environment: makes heads with `mtsp.convert`, exports them, saves ModelOpt's own logits.

    python modelopt_heads.py OUT

OUT/target is a tiny random Llama; OUT/NAME is an exported head, and OUT/NAME.safetensors holds the tokens, the
target's hidden states and, for every unrolled step, the logits of ModelOpt's forward.

ModelOpt 0.47 norms the hidden state with `input_layernorm` before `hidden_norm`, which no engine does. The weight
starts at one, where the second norm changes nothing; the cases keep it there, except the one that is named after it.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.opt as mto
import modelopt.torch.speculative as mtsp
import torch
import transformers
from modelopt import __version__ as version
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, STEPS, TOKENS = 512, 128, 8, 4, 40
SHAPE = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

# What differs from ModelOpt's EAGLE-3 defaults, by case.
EAGLE: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": VOCAB},
    "eagle3-input-norm": {"draft_vocab_size": VOCAB},
    "eagle3-reduced": {"draft_vocab_size": 200},
    "eagle3-taps": {"draft_vocab_size": 200, "eagle_aux_hidden_state_layer_ids": [0, 2, 5], "has_lm_head": True},
    "eagle3-four-taps": {"draft_vocab_size": 200, "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6]},
    "eagle3-two-layers": {"draft_vocab_size": 200, "num_hidden_layers": 2},
    "eagle3-rope": {"draft_vocab_size": 200, "rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
    "eagle3-yarn": {"draft_vocab_size": 200, "export_rope": None},
}


def spread(module: torch.nn.Module, seed: int) -> None:
    """Random weights that make logits differ clearly; norms and biases too, which start as ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.dim() == 1 else 0.1 * noise)


def make_target(directory: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, dtype="float32", **SHAPE,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    spread(model, 1)
    model.save_pretrained(directory)


def target_states(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of every block and the state after the last norm, [1, S, H] each."""
    blocks: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda m, i, o: blocks.append(o if isinstance(o, torch.Tensor) else o[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        last = model.model(input_ids=tokens).last_hidden_state
    for hook in hooks:
        hook.remove()
    return {"tokens": tokens, "blocks": torch.stack(blocks).contiguous(), "last": last.contiguous()}


def eagle(target: Path, out: Path, options: dict[str, Any], tokens: torch.Tensor) -> None:
    """One EAGLE-3 head: convert, randomise, export, unroll STEPS steps in training mode."""
    options = dict(options)
    config = copy.deepcopy(EAGLE3_DEFAULT_CFG)
    config = config.get("config", config)
    rope, export_rope = options.pop("rope", None), options.pop("export_rope", {})
    architecture = {**config.get("eagle_architecture_config", {}), "hidden_size": HIDDEN, "vocab_size": VOCAB, **SHAPE}
    architecture |= {"max_position_embeddings": 2048, "torch_dtype": "float32", **options}
    if rope:
        architecture |= {"rope_scaling": rope, "rope_theta": rope["rope_theta"]}
    config |= {"eagle_architecture_config": architecture, "eagle_use_torch_compile": False, "eagle_ttt_steps": STEPS}
    if export_rope is not None:
        config["eagle_export_rope_scaling"] = export_rope
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    reference = target_states(model, tokens)
    mtsp.convert(model, mode=[("eagle", config)])
    module = model.eagle_module
    spread(module, 2)
    if out.name != "eagle3-input-norm" and architecture["use_aux_hidden_state"]:
        module.layers[0].input_layernorm.weight.data.fill_(1.0)
    if hasattr(module, "d2t"):  # by frequency, as ModelOpt's calibration writes it: not in the order of ids
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[: len(module.d2t)]
        module.d2t.copy_(ids - torch.arange(len(ids)))
    states: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda m, i, o: states.append(o[0].detach()))
    model.train()
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
    hook.remove()
    head = module.lm_head if hasattr(module, "lm_head") else model.lm_head
    with torch.no_grad():
        for step, state in enumerate(states):
            # ModelOpt rolls hidden states right instead of tokens left: anchor i stands in row i + step.
            reference[f"logits.{step}"] = head(state)[:, step:].contiguous()
    model.eval()
    reference["drafts"] = torch.cat(model.pseudo_speculative_generate(tokens, steps=STEPS), dim=1)
    export_speculative_decoding(model, export_dir=out)
    save_file(reference, out.with_suffix(".safetensors"))


def medusa(target: Path, out: Path, heads: int, layers: int, tokens: torch.Tensor) -> None:
    """Medusa heads as `save_pretrained` writes them: beside the whole base model."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    reference = target_states(model, tokens)
    mtsp.convert(model, mode=[("medusa", {"medusa_num_heads": heads, "medusa_num_layers": layers})])
    spread(model.medusa_heads, 4)
    with torch.no_grad():
        answer = model.eval()(input_ids=tokens)
    for i, logits in enumerate(answer.medusa_logits):
        reference[f"logits.{i}"] = logits.contiguous()
    model.save_pretrained(out)
    save_file(reference, out.with_suffix(".safetensors"))


def main(out: Path) -> None:
    torch.set_num_threads(1)
    mto.enable_huggingface_checkpointing()
    out.mkdir(parents=True, exist_ok=True)
    make_target(out / "target")
    tokens = torch.randint(6, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    made: dict[str, str] = {}
    jobs = {name: (eagle, (options, tokens)) for name, options in EAGLE.items()}
    jobs |= {"medusa": (medusa, (3, 1, tokens)), "medusa-two-layers": (medusa, (2, 2, tokens))}
    jobs["eagle1"] = (eagle, ({"use_aux_hidden_state": False, "use_last_layernorm": False}, tokens))
    for name, (make, arguments) in jobs.items():
        try:
            make(out / "target", out / name, *arguments)
        except Exception as error:  # what a peer cannot do is a result, and the other cases go on
            made[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            made[name] = "ok"
        print(name, made[name], flush=True)
    versions = {"nvidia-modelopt": version, "torch": torch.__version__, "transformers": transformers.__version__}
    (out / "made.json").write_text(json.dumps({"versions": versions, "cases": made}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
