"""Regular expressions that split a text before BPE merges, by the value of tokenizer.ggml.pre in GGUF files.

Source: llama.cpp's llama-vocab.cpp, and the tokenizer.json files from which its expressions were made.
"""

from __future__ import annotations

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SLASHED = REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _by_case(after: str, digits: str, rest: str = SLASHED, letters: tuple[str, str] = (UPPER, LOWER)) -> str:
    """Expression for words that end where the case changes, each with an optional suffix `after`, and for numbers."""
    start, (upper, lower) = r"[^\r\n\p{L}\p{N}]?", letters
    return rf"{start}{upper}*{lower}+{after}|{start}{upper}+{lower}*{after}|{digits}|{rest}"


LLAMA3 = (rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",)
QWEN2 = (rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}",)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Letters with a case in Unicode 11, as in the expressions of deepseek-llm.
CASED = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    r"\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    r"\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    r"\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    r"\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    r"\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    r"\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
SIGNS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
IDEOGRAPHS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
NO_HAN = UPPER.replace("]", r"&&[^\p{Han}]]"), LOWER.replace("]", r"&&[^\p{Han}]]")
QWEN35 = (
    QWEN2[0].replace(WORDS, WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")).replace(r"[^\s\p{L}\p", r"[^\s\p{L}\p{M}\p"),
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DIGITS = r"\p{N}{1,3}"
GPT4O = (_by_case(f"{CONTRACTIONS}?", DIGITS),)
# Values of tokenizer.ggml.pre -> expressions that split a text one after the other. An empty tuple stands for GPT-2's
# expression, "digits" for a split at each digit and then GPT-2's expression.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4", "glm5"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), QWEN2),
    **dict.fromkeys(("kormo", "f2llmv2", "grok-2", "solar-open"), QWEN2),
    "qwen35": QWEN35,
    "tekken": (_by_case("", r"\p{N}"),),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_by_case(f"{CONTRACTIONS}?", r"\p{N}{1,3}"),)
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{CASED}]+",
        rf"\s?{SIGNS}+",
        r"\s+$",
        IDEOGRAPHS,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "seed-coder": (rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (rf"'(?i:[sdmt]|ll|ve|re)|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    "kimi-k2": (rf"\p{{Han}}+|{_by_case(f'{CONTRACTIONS}?', DIGITS, REST, NO_HAN)}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{CONTRACTIONS}|{WORDS}|\p{{N}}+|{REST}"),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        (
            r"\d{1,3}(?=(?:\d{3})*\b)",
            _by_case(f"{CONTRACTIONS}?", DIGITS),
        ),
    ),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "olmo",
            "mpt",
            "exaone4",
            "jina-es",
            "jina-de",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
        ),
        (),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), ("digits",)
    ),
}
BEGUN = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}  # BOS begins a text
WHOLE_WORDS = {*BEGUN, "tekken", "glm4", "glm5", "minicpm5"}  # a piece that is a token is not merged
# Texts are normalised to NFC first, as these families' own tokenizers do; llama.cpp does not.
NORMALISED = {"qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"}
