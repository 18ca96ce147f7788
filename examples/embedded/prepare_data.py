"""Text -> tokenizer and token streams for the embedded pair.

Reads the chat and story files of a data directory (see LICENSES.md beside this file), trains a Llama-2-style
byte-fallback BPE on them, writes `tokenizer.json` with a chat template, and packs train and held-out tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Conversation = list[dict[str, str]]

CHAT_FILES = {  # file -> how often it is seen in one epoch
    "chat/synthetic_persona_chat.jsonl": 1,
    "chat/taskmaster3_movie.jsonl": 1,
    "chat/taskmaster4_coffee.jsonl": 1,
}
STORY_FILES = ("text/pratham_books_en.jsonl", "text/african_storybook_en.jsonl")
SPECIAL = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HELD_OUT_EVERY = 50


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def clean(text: str) -> str:
    return " ".join(text.replace('""', '"').split())


def story_request(title: str, rng: random.Random) -> str:
    asks = ("Tell me a story.", f'Tell me the story "{title}".', f'Please read me "{title}".')
    return rng.choice(asks)


def load_conversations(data: Path) -> list[Conversation]:
    """Every conversation of the chosen files, in a fixed order."""
    rng = random.Random(0)
    conversations: list[Conversation] = []
    for name, repeats in CHAT_FILES.items():
        rows = read_rows(data / name)
        chats = [[{"role": m["role"], "content": clean(m["content"])} for m in row["messages"]] for row in rows]
        conversations += [chat for chat in chats if chat and all(m["content"] for m in chat)] * repeats
    for name in STORY_FILES:
        for row in read_rows(data / name):
            title = clean(str(row.get("title", "a story")))
            conversations.append(
                [
                    {"role": "user", "content": story_request(title, rng)},
                    {"role": "assistant", "content": clean(row["text"])},
                ]
            )
    rng.shuffle(conversations)
    return conversations


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-fallback BPE whose merges never cross a space, in Llama 2's normaliser and decoder."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r"\d|[^\w\s▁']"), behavior="isolated"),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(bytes_), special_tokens=SPECIAL, limit_alphabet=96, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    state = json.loads(learner.to_str())["model"]

    learned = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    # Llama 2's order: unk, bos, eos, then the 256 bytes; our role markers follow them.
    order = SPECIAL[:3] + bytes_ + SPECIAL[3:] + [t for t in learned if t not in SPECIAL]
    vocab = {token: index for index, token in enumerate(order)}
    merges = [tuple(m) for m in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # The name that every version of transformers, vLLM and llama.cpp's converter knows.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> np.ndarray:
    texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations]
    batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in batch])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory with chat/ and text/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    conversations = load_conversations(args.data)
    held_out = conversations[::HELD_OUT_EVERY]
    train = [c for i, c in enumerate(conversations) if i % HELD_OUT_EVERY]
    tokenizer = train_tokenizer([m["content"] for c in train for m in c], args.vocab_size)
    save_tokenizer(tokenizer, args.out / "tokenizer")
    for name, part in (("train", train), ("held_out", held_out)):
        tokens = encode(tokenizer, part)
        np.save(args.out / f"{name}.npy", tokens)
        characters = sum(len(m["content"]) for c in part for m in c)
        print(f"{name}: {len(part)} conversations, {len(tokens)} tokens, {characters / len(tokens):.2f} chars a token")
    with open(args.out / "held_out.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": c}, ensure_ascii=False) + "\n" for c in held_out)


if __name__ == "__main__":
    main()
