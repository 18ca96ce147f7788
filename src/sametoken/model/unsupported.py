"""Tables of unsupported contents of a config.json, and their conversion to error messages.

A line is removed when its content is supported. Names are those of transformers' model and quantiser code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sametoken.errors import shown


class ModelGroup(NamedTuple):
    """Description of a group of models, after "is", and the alternative to use."""

    what: str
    instead: str


DENSE = "use a model of the supported families, for example Qwen/Qwen3-8B or, with experts, Qwen/Qwen3-30B-A3B"
EXPERTS = ModelGroup("a mixture of experts with other parts than those supported", DENSE)
LATENT = ModelGroup("a mixture of experts with latent attention (MLA), which is not supported yet", DENSE)
SEES = "a model that reads images or sound beside text, which is not supported"
TEXT_ONLY = "use a text-only model of the supported families"
GEMMA = ModelGroup("a Gemma decoder of the first kind, which is not supported", "use Gemma 2 or 3")
RECURRENT = ModelGroup("a model with recurrent (state space or linear attention) layers, which is not supported", DENSE)
CAUSAL = "use a causal language model (a name that ends in ForCausalLM)"
ENCODER = ModelGroup("an encoder, which writes no text", CAUSAL)
BOTH = ModelGroup("an encoder-decoder, which is not supported", CAUSAL)
OTHER = ModelGroup("a decoder of another family, which is not supported", "use a model of the supported families")

# Names in the spelling of config.json's `architectures`.
ARCHITECTURES: dict[str, ModelGroup] = {
    **dict.fromkeys(
        ("OlmoeForCausalLM", "PhimoeForCausalLM", "PhiMoEForCausalLM", "DbrxForCausalLM",
         "MiniMaxM2ForCausalLM", "GraniteMoeForCausalLM", "Grok1ForCausalLM"), EXPERTS),
    **dict.fromkeys(
        ("DeepseekV32ForCausalLM", "KimiK2ForCausalLM"), LATENT),
    "GemmaForCausalLM": GEMMA,
    "Gemma3nForConditionalGeneration": ModelGroup(
        "Gemma 3n, a model that reads images and sound beside text, which is not supported", GEMMA.instead),
    "Mistral3ForConditionalGeneration": ModelGroup(
        "Mistral Small 3.1 or later, a Mistral decoder inside a model that reads images, which is not supported yet",
        "use a text-only Mistral (MistralForCausalLM), for example mistralai/Mistral-Small-24B-Instruct-2501",
    ),
    "Ministral3ForCausalLM": OTHER,
    "Phi3VForCausalLM": ModelGroup(SEES, "use the text-only Phi-3 or Phi-4-mini"),
    "Phi4MMForCausalLM": ModelGroup(SEES, "use the text-only microsoft/Phi-4-mini-instruct"),
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ModelGroup(SEES, "use the text-only Qwen2.5 of that size, or Qwen3-VL")),
    "MllamaForConditionalGeneration": ModelGroup(SEES, "use the text-only Llama 3.1 to 3.3"),
    **dict.fromkeys(
        ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "BambaForCausalLM",
         "Qwen3NextForCausalLM", "RwkvForCausalLM", "NemotronHForCausalLM"), RECURRENT),
}  # fmt: skip

# Endings of names that no table lists, in the order in which they are tried.
ENDINGS: dict[str, ModelGroup] = {
    "MoeForCausalLM": EXPERTS,
    **dict.fromkeys(("CausalLM", "LMHeadModel"), OTHER),
    "ForConditionalGeneration": ModelGroup(SEES, TEXT_ONLY),
    **dict.fromkeys(
        ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForPreTraining",
         "ForMultipleChoice", "ForTextEncoding", "Model"), ENCODER),
}  # fmt: skip
UNKNOWN = ModelGroup("no causal language model that is known here", TEXT_ONLY)
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# Formats of stored weights by `quant_method`, or by the algorithm that Model-Optimizer states.
FORMATS: dict[str, str] = {
    "awq": "AWQ (4-bit integers)",
    "gptq": "GPTQ (packed integers)",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "mxfp4": "MXFP4 (4-bit floats)",
    "nvfp4": "NVFP4 (4-bit floats)",
    "modelopt": "Model-Optimizer",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "auto-round": "AutoRound",
    "quark": "Quark",
    "torchao": "torchao",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "bitnet": "BitNet",
}
UNQUANTISED = "use the unquantised checkpoint, and --quantization int8 or int4 to store its weights small"


def refused_architecture(config: Mapping[str, Any], supported: Iterable[str]) -> str | None:
    """Reason why the architecture of a config.json cannot be served, None if it can.

    Args:
        config: the file's content; `architectures` is a list of names.
        supported: the names that can be loaded.
    """
    names = config["architectures"]
    if names[0] in supported and config.get("is_encoder_decoder") is not True:
        return None
    kind = _kind(names[0], config)
    listed = ", ".join(supported)
    return f"the architecture {shown(names[0])} is {kind.what}; {kind.instead} (supported: {listed})"


def _kind(name: str, config: Mapping[str, Any]) -> ModelGroup:
    if config.get("is_encoder_decoder") is True:
        return BOTH
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if any(config.get(key) for key in EXPERT_KEYS):
        return EXPERTS
    if isinstance(config.get("vision_config"), Mapping) or isinstance(config.get("audio_config"), Mapping):
        return ModelGroup(SEES, TEXT_ONLY)
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), UNKNOWN)


def refused_format(config: Mapping[str, Any]) -> str | None:
    """Reason why the stored weights of a config.json cannot be read, None if they can."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return f"config.json has {key!r}: {quantised(config[key])}"
    return None


def quantised(stated: Any) -> str:
    """Error message about weights that are declared as quantised: their format, and the alternative to use."""
    stated = stated if isinstance(stated, Mapping) else {}
    method, algorithm = (stated.get(key) for key in ("quant_method", "quant_algo"))
    names = [FORMATS.get(str(name).lower(), shown(name)) for name in (method, algorithm) if name is not None]
    format = " ".join(dict.fromkeys(names)) or "a format that it does not name"
    return f"the weights are quantised ({format}), which is not supported yet; {UNQUANTISED}"
