"""Every stored tensor ends up in its rows, once; what does not fit is refused with its name.

Oracles: `transformers` models saved by their own `save_pretrained`, and tensors that the tests concatenate themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import CheckpointError, UnsupportedModelError

HIDDEN, HEADS, KV_HEADS, SIZE, WIDTH, VOCAB, LAYERS = 16, 4, 2, 6, 20, 32, 2
SHAPES = SimpleNamespace(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=SIZE,
    intermediate_size=WIDTH,
    tie_word_embeddings=False,
    num_layers=2,
    further_layers=0,
    latent=None,
    architecture="Qwen3ForCausalLM",
    family="qwen3",
    experts=None,
)
FILE = Path("model.safetensors")


class Packable(nn.Linear):
    """Records what it held when it was packed."""

    def pack(self) -> None:
        assert not any(p.is_meta for p in self.parameters())
        self.packed = self.weight.detach().clone()
        del self.weight


def skeleton(bias: bool = False, tied: bool = False) -> nn.Module:
    """Modules with the decoder's names, on the meta device."""
    with torch.device("meta"):
        blocks = nn.ModuleList()
        for _ in range(LAYERS):
            block = nn.Module()
            block.attention_norm, block.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
            block.q_norm, block.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
            block.qkv = Packable(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE, bias=bias)
            block.out = Packable(HEADS * SIZE, HIDDEN, bias=False)
            block.gate_up = Packable(HIDDEN, 2 * WIDTH, bias=False)
            block.down = Packable(WIDTH, HIDDEN, bias=False)
            blocks.append(block)
        module = nn.Module()
        module.embed, module.blocks, module.norm = nn.Embedding(VOCAB, HIDDEN), blocks, nn.RMSNorm(HIDDEN)
        if not tied:
            module.head = Packable(HIDDEN, VOCAB, bias=False)
    return module


def tensors(prefix: str = "model.", bias: bool = False) -> dict[str, Tensor]:
    """Random tensors of a Qwen-like checkpoint, by name."""
    torch.manual_seed(0)
    found = {f"{prefix}embed_tokens.weight": torch.randn(VOCAB, HIDDEN), f"{prefix}norm.weight": torch.randn(HIDDEN)}
    rows = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        for part, count in rows.items():
            found[f"{layer}.self_attn.{part}_proj.weight"] = torch.randn(count, HIDDEN)
            if bias:
                found[f"{layer}.self_attn.{part}_proj.bias"] = torch.randn(count)
        found |= {
            f"{layer}.self_attn.o_proj.weight": torch.randn(HIDDEN, HEADS * SIZE),
            f"{layer}.self_attn.q_norm.weight": torch.randn(SIZE),
            f"{layer}.self_attn.k_norm.weight": torch.randn(SIZE),
            f"{layer}.mlp.gate_proj.weight": torch.randn(WIDTH, HIDDEN),
            f"{layer}.mlp.up_proj.weight": torch.randn(WIDTH, HIDDEN),
            f"{layer}.mlp.down_proj.weight": torch.randn(HIDDEN, WIDTH),
            f"{layer}.input_layernorm.weight": torch.randn(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.randn(HIDDEN),
        }
    return found | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}


def load(
    found: dict[str, Tensor], tied: bool = False, bias: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Module:
    module = skeleton(bias, tied)
    rules = rules_for(SimpleNamespace(**{**vars(SHAPES), "tie_word_embeddings": tied}))
    load_parameters(module, (Stored(name, tensor, FILE) for name, tensor in found.items()), rules, dtype, "cpu")
    return module


def refused(found: dict[str, Tensor], **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(found, **options)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("backwards", [False, True])
def test_pieces_are_fused_in_any_order_with_and_without_prefix(prefix: str, backwards: bool) -> None:
    found = tensors(prefix, bias=True)
    module = load(dict(reversed(found.items())) if backwards else found, bias=True)
    for i in range(LAYERS):
        layer, block = f"{prefix}layers.{i}", module.blocks[i]
        for kind, got in (("weight", block.qkv.packed), ("bias", block.qkv.bias)):
            assert torch.equal(got, torch.cat([found[f"{layer}.self_attn.{p}_proj.{kind}"] for p in "qkv"]))
        gate_up = [found[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(block.gate_up.packed, torch.cat(gate_up))
        assert torch.equal(block.out.packed, found[f"{layer}.self_attn.o_proj.weight"])
        assert torch.equal(block.down.packed, found[f"{layer}.mlp.down_proj.weight"])
        assert torch.equal(block.q_norm.weight, found[f"{layer}.self_attn.q_norm.weight"])
        assert torch.equal(block.mlp_norm.weight, found[f"{layer}.post_attention_layernorm.weight"])
    assert torch.equal(module.embed.weight, found[f"{prefix}embed_tokens.weight"])
    assert torch.equal(module.norm.weight, found[f"{prefix}norm.weight"])
    assert torch.equal(module.head.packed, found["lm_head.weight"])


def test_fused_projections_of_phi3() -> None:
    separate = tensors()
    fused = {
        name: t for name, t in separate.items() if not any(f".{p}_proj" in name for p in ("q", "k", "v", "gate", "up"))
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        qkv = [separate[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
        fused[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
        fused[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(
            [separate[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        )
    ours, theirs = load(fused), load(separate)
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        assert torch.equal(a.qkv.packed, b.qkv.packed)
        assert torch.equal(a.gate_up.packed, b.gate_up.packed)


def test_tied_head_and_derived_buffers_are_not_needed() -> None:
    found = tensors()
    del found["lm_head.weight"]
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "model.rotary_emb.inv_freq": torch.ones(3),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
        "medusa_heads.0.0.linear.weight": torch.ones(HIDDEN, HIDDEN),
    }
    for more in ({}, extra):
        assert torch.equal(load(found | more, tied=True).embed.weight, found["model.embed_tokens.weight"])


def test_dtype_is_converted() -> None:
    found = tensors()
    module = load(found, dtype=torch.bfloat16)
    assert torch.equal(module.head.packed, found["lm_head.weight"].to(torch.bfloat16))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_missing_unexpected_and_duplicate_are_reported_together() -> None:
    found = tensors()
    del found["model.layers.1.self_attn.k_proj.weight"]
    del found["model.norm.weight"]
    del found["model.layers.0.mlp.gate_proj.weight"]
    del found["model.layers.0.mlp.up_proj.weight"]
    found |= {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(HEADS * SIZE),
        "model.layers.7.mlp.down_proj.weight": torch.ones(1),
        "vision.patch": torch.ones(1),
        "embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "model.layers.0.self_attn.qkv_proj.weight": torch.ones((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
    }
    message = refused(found)
    missing, unexpected, duplicate = message.removeprefix("the weights do not match the configuration: ").split("; ")
    assert missing.startswith("3 missing: ")
    assert set(missing.removeprefix("3 missing: ").split(", ")) == {
        "model.layers.1.self_attn.k_proj.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_up_proj.weight or its parts",
    }
    assert unexpected == (
        "3 unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.7.mlp.down_proj.weight, vision.patch"
    )
    assert duplicate.startswith("2 duplicate: embed_tokens.weight, model.layers.0.self_attn.qkv_proj.weight.")


def test_long_lists_are_cut_with_their_count() -> None:
    message = refused(tensors() | {f"extra.{i}": torch.ones(1) for i in range(30)})
    assert "30 unexpected: extra.0, " in message
    assert "extra.7, and 22 more" in message
    assert "extra.8" not in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lm_head.weight", (VOCAB + 1, HIDDEN)), ("model.layers.0.self_attn.k_proj.weight", (KV_HEADS * SIZE, 3))],
)
def test_shape_that_does_not_fit_names_file_parameter_got_and_expected(name: str, shape: tuple[int, int]) -> None:
    found = tensors()
    expected = list(found[name].shape)
    message = refused(found | {name: torch.ones(shape)})
    assert message.startswith(f"{FILE}: {name} has shape {list(shape)}, expected {expected}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 77, -1])
def test_weights_that_are_no_numbers(value: float, dtype: torch.dtype, at: int) -> None:
    found = tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    found[name] = found[name].to(dtype)
    found[name].view(-1)[at] = value
    assert f"{name} holds NaN or Inf" in refused(found, dtype=dtype)


def test_number_too_large_for_the_dtype() -> None:
    assert "holds NaN or Inf as torch.float16" in refused(
        tensors() | {"model.norm.weight": torch.full((HIDDEN,), 1e6)}, dtype=torch.float16
    )


def test_quantised_integers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight holds torch\.int8"):
        load(tensors() | {"lm_head.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.int8)})


def test_at_most_one_stored_tensor_is_alive() -> None:
    """The reader may hand out the next tensor only after the loader has let go of the one before."""
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[Stored]:
        for name, tensor in tensors().items():
            copy = tensor.clone()
            assert sum(ref() is not None for ref in alive) <= 1
            alive.append(weakref.ref(copy))
            yield Stored(name, copy, FILE)

    load_parameters(skeleton(), stream(), rules_for(SHAPES), torch.float32, "cpu")
    assert len(alive) == len(tensors())


# Whole models


def hugging_face(family: str, **more: Any) -> Any:
    """A tiny random transformers model."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # norms start as ones and biases as zeros, which would hide a mix-up
        nn.init.normal_(parameter, std=0.3)
    return model


def plain(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Phi3", {}),
    ],
)
def test_decoder_holds_every_tensor_of_a_sharded_model(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    model = hugging_face(family, **more)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    decoder = load_decoder(tmp_path, torch.float32, "cpu")
    state, names = model.state_dict(), dict(decoder.named_parameters())
    names |= {  # but for the copy of the table that a tied head reads
        f"{n}.weight": m.weight
        for n, m in decoder.named_modules()
        if isinstance(getattr(m, "weight", None), Tensor) and n != "embed.head"
    }
    checked = {"lm_head.weight"} if decoder.head is None else set()
    tops = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    parts = {
        "attention_norm": ["input_layernorm"], "mlp_norm": ["post_attention_layernorm"],
        "q_norm": ["self_attn.q_norm"], "k_norm": ["self_attn.k_norm"],
        "qkv": ["self_attn.qkv_proj"] if family == "Phi3" else [f"self_attn.{p}_proj" for p in "qkv"],
        "gate_up": ["mlp.gate_up_proj"] if family == "Phi3" else ["mlp.gate_proj", "mlp.up_proj"],
        "out": ["self_attn.o_proj"], "down": ["mlp.down_proj"],
    }  # fmt: skip
    for name, got in names.items():
        path, kind = name.rsplit(".", 1)
        if path in tops:
            sources = [f"{tops[path]}.{kind}"]
        else:
            _, index, part = path.split(".")
            sources = [f"model.layers.{index}.{source}.{kind}" for source in parts[part]]
        assert torch.equal(plain(got), torch.cat([state[source] for source in sources])), name
        checked |= set(sources)
    assert checked == set(state)


def test_max_seq_len_reaches_the_configuration(tmp_path: Path) -> None:
    hugging_face("Llama").save_pretrained(tmp_path)
    assert load_decoder(tmp_path, torch.float32, "cpu").config.max_position == 64
    assert load_decoder(tmp_path, torch.float32, "cpu", max_seq_len=48).config.max_position == 48


def test_loading_ends_with_the_error_of_its_watch(tmp_path: Path) -> None:
    hugging_face("Llama").save_pretrained(tmp_path)
    seen: list[int] = []

    def watch() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise CheckpointError("the tokenizer is bad")

    with pytest.raises(CheckpointError, match="the tokenizer is bad"):
        load_decoder(tmp_path, torch.float32, "cpu", watch=watch)
    assert len(seen) == 3


def test_errors_of_the_configuration_name_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match=rf"{tmp_path}: .*GPT2LMHeadCausalLM"):
        load_decoder(tmp_path, torch.float32, "cpu")
