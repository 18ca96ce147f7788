"""Which experts a token gets, against the routers of transformers on the same hidden states in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, PreTrainedConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from native_checks import kernels, threads
from sametoken.kernels.cpu.library import Library
from sametoken.model import linear as linear_module
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.experts import Experts
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import ancestors

__all__ = ["kernels", "threads"]  # fixtures

HIDDEN, EXPERTS, TOKENS = 96, 16, 400
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 3, "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROUTERS: dict[str, tuple[type[PreTrainedConfig], type[nn.Module]]] = {
    "DeepseekV2ForCausalLM": (DeepseekV2Config, DeepseekV2TopkRouter),
    "DeepseekV3ForCausalLM": (DeepseekV3Config, DeepseekV3TopkRouter),
    "Glm4MoeForCausalLM": (Glm4MoeConfig, Glm4MoeTopkRouter),
}
OWN = {
    "DeepseekV2ForCausalLM": {"topk_method": "group_limited_greedy"},
    "Glm4MoeForCausalLM": {"head_dim": 32},
}


def twins() -> Tensor:
    """[EXPERTS, HIDDEN] bfloat16 router weights in pairs that differ a little: logits of most pairs are one bfloat16
    number, and far from one float32 number."""
    weight = torch.randn(EXPERTS // 2, HIDDEN, generator=torch.Generator().manual_seed(3)).repeat_interleave(2, 0)
    weight = weight.mul(0.3).bfloat16()
    weight[1::2, :4] *= 1 + 2**-7
    return weight


def hidden_states() -> Tensor:
    """[TOKENS, HIDDEN] bfloat16, of mean square 1, so that a norm leaves them as they are."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return (x / x.square().mean(1, keepdim=True).sqrt()).bfloat16()


def routed(architecture: str) -> tuple[ModelConfig, Tensor]:
    """A model, and the weights of all experts [TOKENS, EXPERTS] by the router of transformers, 0 where not chosen."""
    config_class, router_class = ROUTERS[architecture]
    config = config_class(**SIZES, **OWN.get(architecture, {}))
    router: Any = router_class(config).bfloat16()
    router.weight.data.copy_(twins())
    _, weights, chosen = router(hidden_states())
    ours = ModelConfig.from_hf({**config.to_dict(), "architectures": [architecture]})
    return ours, torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights.float())


def filled(experts: Experts) -> Experts:
    for name, parameter in experts.named_parameters():
        parameter.data.copy_(twins() if name == "router.weight" else torch.zeros(parameter.shape))
    return experts


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("architecture", ROUTERS)
def test_near_ties_are_decided_in_float32(
    architecture: str, compiled: bool, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(linear_module, "library", lambda: None)
    config, expected = routed(architecture)
    assert config.experts is not None
    experts = filled(Experts(config, config.experts, torch.bfloat16, None))
    experts.router.pack()
    assert (experts.router.native is not None) == compiled
    logits = experts.router(hidden_states())
    weights, chosen = experts.route(logits)
    found = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    narrow = torch.zeros(TOKENS, EXPERTS).scatter(1, experts.route(logits.bfloat16().float())[1], 1.0)
    assert ((narrow != 0) != (expected != 0)).any(1).float().mean() > 0.1, "bfloat16 logits choose others"


def test_so_does_the_compiled_forward(kernels: Library) -> None:
    """Attention adds nothing, and expert e adds something to place e of the hidden state alone."""
    config, expected = routed("Glm4MoeForCausalLM")
    decoder = Decoder(config, torch.bfloat16)
    for parameter in decoder.parameters():
        nn.init.zeros_(parameter)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
    decoder.embed.weight.data.copy_(hidden_states())
    experts = decoder.blocks[0].get_submodule("experts")
    assert isinstance(experts, Experts)
    for place, expert in enumerate(filled(experts).every[:EXPERTS]):
        expert.gate_up.weight.data.copy_(hidden_states()[:32].repeat(2, 1))  # so that gate and up have one sign
        expert.down.weight.data[place] = 1.0
    for module in decoder.modules():
        if hasattr(module, "pack"):
            module.pack()
    assert decoder.native is not None
    table = PageTable(1, TOKENS // 16 + 2, TOKENS // 16 + 1, 16, "cpu")
    table.extend(0, range(1, TOKENS // 16 + 2))
    cache = KVCache.of(config, table, torch.bfloat16, "cpu")
    parents = torch.arange(-1, TOKENS - 1)[None]
    zero = torch.zeros(1, dtype=torch.int64)
    span = Span(zero, (0,), zero, ancestors(parents), TOKENS, TOKENS)
    last = decoder(torch.arange(TOKENS), cache, cache.view([span])).last
    added = (last.float() - hidden_states().float())[:, :EXPERTS]
    assert torch.equal(added != 0, expected != 0)
