"""Chat templates by llama.cpp's names, for `--chat-template NAME`, as data from which Jinja is generated.

Source: src/llama-chat.cpp of llama.cpp; a test compares the results with the texts of llama.cpp's tests. The templates
include the tokens that llama.cpp's tokenizers put before a prompt, as other chat templates do.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

CONTENT = "(message['content'] or '')"
PARTS = {"{}": CONTENT, "{t}": f"{CONTENT} | trim", "{role}": "message['role']", "{ROLE}": "message['role'] | upper"}
BOS = "{{ bos_token }}"


class Form(NamedTuple):
    """Format in which a conversation is rendered as text.

    Attributes:
        system: turn of the system; in all turns {} is the content, {t} the content without surrounding blanks, {role}
            the role, {ROLE} the role in capitals.
        user: turn of the user; "" for `system`.
        assistant: turn of the assistant; "" for `user`.
        reply: beginning of a reply.
        tool: result of a tool; "" for `user`.
        bos: true if the text begins with BOS.
        start: text at the beginning, after BOS.
        opens: text before the first turn, and before each turn after the assistant's.
        again: text before a turn after the assistant's, if other than `opens`.
        merges: true if the system's text is put before the next user's, with two newlines between them.
        without: text in place of a system turn in a conversation that begins without one.
    """

    system: str
    user: str = ""
    assistant: str = ""
    reply: str = ""
    tool: str = ""
    bos: bool = False
    start: str = ""
    opens: str = ""
    again: str = ""
    merges: bool = False
    without: str = ""


def jinja(form: Form) -> str:
    """Chat template of a form."""
    roles = {"system": form.system, "user": form.user or form.system, "assistant": form.assistant or form.user}
    roles["assistant"] = roles["assistant"] or form.system
    text = (BOS if form.bos else "") + _expression(form.start)
    if form.merges:
        text += "{% set first = namespace(text='') %}"
    if form.without:
        text += "{% if messages[0]['role'] != 'system' %}" + _expression(form.without) + "{% endif %}"
    text += "{% for message in messages %}"
    if form.opens:
        again = form.again or form.opens
        text += "{% if loop.first %}" + _expression(form.opens) + "{% elif loop.previtem['role'] == 'assistant' %}"
        text += _expression(again) + "{% endif %}"
    text += "{% if message['role'] == 'assistant' %}" + _expression(roles["assistant"])
    system, user = _expression(roles["system"]), _expression(roles["user"])
    if form.merges:
        content = f"(first.text ~ {CONTENT})" if "{}" in form.user else f"(first.text ~ ({CONTENT} | trim))"
        user = re.sub(r"\(message\['content'\] or ''\)( \| trim)?", lambda _: content, user)
        user += "{% set first.text = '' %}"
        system = "{% set first.text = first.text ~ (" + f"{CONTENT} | trim" + ") ~ '\\n\\n' %}"
    text += "{% elif message['role'] == 'system' %}" + system
    if form.tool:
        text += "{% elif message['role'] == 'tool' %}" + _expression(form.tool)
    text += "{% else %}" + user + "{% endif %}{% endfor %}"
    return text + ("{% if add_generation_prompt %}" + _expression(form.reply) + "{% endif %}" if form.reply else "")


def _expression(form: str) -> str:
    """Jinja expression for a text of a form."""
    parts = [part for part in re.split(r"(\{t?\}|\{role\}|\{ROLE\})", form) if part]
    spoken = [f"({PARTS[part]})" if part in PARTS else json.dumps(part, ensure_ascii=False) for part in parts]
    return "{{ " + " ~ ".join(spoken) + " }}" if spoken else ""


_LLAMA2 = Form("<<SYS>>\n{}\n<</SYS>>\n\n", "{} [/INST]", "{}</s>", bos=True, opens="[INST] ")
_MISTRAL = Form("{}\n\n", "{}[/INST]", " {}</s>", bos=True, opens="[INST] ")
_MISTRAL_7 = Form("[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}</s>", bos=True)
_EXAONE = Form("[|system|]{t}[|endofturn|]\n", "[|user|]{t}\n", "[|assistant|]{t}[|endofturn|]\n", "[|assistant|]")
_GRANITE = Form(
    "<|start_of_role|>{role}<|end_of_role|>{}<|end_of_text|>\n", reply="<|start_of_role|>assistant<|end_of_role|>"
)
_VICUNA = Form("{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:", bos=True)
_BAILING = Form("<role>{ROLE}</role>{}", "<role>HUMAN</role>{}", "<role>ASSISTANT</role>{}", "<role>ASSISTANT</role>")
_COMMAND = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>{t}<|END_OF_TURN_TOKEN|>"
_END = "<｜end▁of▁sentence｜>"
FORMS = {
    "chatml": Form("<|im_start|>{role}\n{}<|im_end|>\n", reply="<|im_start|>assistant\n"),
    "llama2": _LLAMA2._replace(system="{}\n"),
    "llama2-sys": _LLAMA2,
    "llama2-sys-bos": _LLAMA2._replace(again="<s>[INST] "),
    "llama2-sys-strip": Form("<<SYS>>\n{t}\n<</SYS>>\n\n", "{t} [/INST]", "{t}</s>", bos=True, opens="[INST] "),
    "mistral-v1": _MISTRAL._replace(user="{} [/INST]", opens=" [INST] "),
    "mistral-v3": _MISTRAL._replace(assistant=" {t}</s>"),
    "mistral-v3-tekken": _MISTRAL._replace(assistant="{}</s>", opens="[INST]"),
    "mistral-v7": _MISTRAL_7,
    "mistral-v7-tekken": Form("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}</s>", bos=True),
    "phi3": Form("<|{role}|>\n{}<|end|>\n", reply="<|assistant|>\n"),
    "phi4": Form("<|im_start|>{role}<|im_sep|>{}<|im_end|>", reply="<|im_start|>assistant<|im_sep|>"),
    "falcon3": Form("<|{role}|>\n{}\n", reply="<|assistant|>\n"),
    "zephyr": Form("<|{role}|>\n{}<|endoftext|>\n", reply="<|assistant|>\n"),
    "monarch": Form("<s>{role}\n{}</s>\n", reply="<s>assistant\n"),
    "gemma": Form(
        "", "<start_of_turn>{role}\n{t}<end_of_turn>\n", "<start_of_turn>model\n{t}<end_of_turn>\n",
        "<start_of_turn>model\n", bos=True, merges=True,
    ),
    "orion": Form("", "Human: {}\n\nAssistant: </s>", "{}</s>", bos=True, merges=True),
    "openchat": Form(
        "{}<|end_of_turn|>", "GPT4 Correct User: {}<|end_of_turn|>", "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:", bos=True,
    ),
    "vicuna": _VICUNA,
    "vicuna-orca": _VICUNA._replace(system="SYSTEM: {}\n"),
    "deepseek": Form(
        "{}", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "### Response:\n", bos=True
    ),
    "deepseek2": Form("{}\n\n", "User: {}\n\n", "Assistant: {}" + _END, "Assistant:", bos=True),
    "deepseek3": Form("{}\n\n", "<｜User｜>{}", "<｜Assistant｜>{}" + _END, "<｜Assistant｜>", bos=True),
    "deepseek-ocr": Form("{}", bos=True),
    "command-r": Form(
        _COMMAND % "SYSTEM", _COMMAND % "USER", _COMMAND % "CHATBOT", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        bos=True,
    ),
    "llama3": Form(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{t}<|eot_id|>",
        reply="<|start_header_id|>assistant<|end_header_id|>\n\n", bos=True,
    ),
    "llama4": Form(
        "<|header_start|>{role}<|header_end|>\n\n{t}<|eot|>",
        reply="<|header_start|>assistant<|header_end|>\n\n", bos=True,
    ),
    "chatglm3": Form("<|{role}|>\n {}", reply="<|assistant|>", start="[gMASK]sop"),
    "chatglm4": Form("<|{role}|>\n{}", reply="<|assistant|>\n", start="[gMASK]<sop>"),
    "glmedge": Form("<|{role}|>\n{}", reply="<|assistant|>"),
    "minicpm": Form("{t}", "<用户>{t}<AI>", "{t}", bos=True),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE._replace(tool="[|tool|]{t}[|endofturn|]\n"),
    "exaone-moe": Form("<|{role}|>\n{t}<|endofturn|>\n", reply="<|assistant|>\n"),
    "rwkv-world": Form("System: {t}\n\n", "User: {t}\n\n", "Assistant: {t}\n\n", "Assistant:"),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "gigachat": Form(
        "{}<|message_sep|>",
        "user<|role_sep|>{}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{}<|message_sep|>", "assistant<|role_sep|>", start="<s>",
    ),
    "yandex": Form("", " Пользователь: {}\n\n", " Ассистент: {}\n\n", " Ассистент:[SEP]", bos=True),
    "megrez": Form("<|role_start|>{role}<|role_end|>{}<|turn_end|>", reply="<|role_start|>assistant<|role_end|>"),
    "bailing": _BAILING,
    "bailing-think": _BAILING._replace(reply="<role>ASSISTANT</role><think>"),
    "bailing2": Form(
        "<role>{ROLE}</role>{}<|role_end|>", "<role>HUMAN</role>{}<|role_end|>", "<role>ASSISTANT</role>{}<|role_end|>",
        "<role>ASSISTANT</role>", without="<role>SYSTEM</role>detailed thinking off<|role_end|>",
    ),
    "smolvlm": Form(
        "{}\n\n", "User: {}<end_of_utterance>\n", "Assistant: {}<end_of_utterance>\n", "Assistant:",
        start="<|im_start|>",
    ),
    "hunyuan-moe": Form("<|startoftext|>{}<|extra_4|>", "<|startoftext|>{}<|extra_0|>", "{}<|eos|>"),
    "hunyuan-dense": Form(
        "{}<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>{}<｜hy_Assistant｜>",
        "<｜hy_Assistant｜>{}<｜hy_place▁holder▁no▁2｜>",
    ),
    "hunyuan-vl": Form(
        "{}<｜hy_place▁holder▁no▁3｜>", "{}<｜hy_User｜>", "{}<｜hy_Assistant｜>", start="<｜hy_begin▁of▁sentence｜>"
    ),
    "gpt-oss": Form(
        "<|start|>{role}<|message|>{}<|end|>", assistant="<|start|>assistant<|message|>{}<|return|>",
        reply="<|start|>assistant",
    ),
    "kimi-k2": Form(
        "<|im_system|>system<|im_middle|>{}<|im_end|>", "<|im_user|>user<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>",
        tool="<|im_system|>tool<|im_middle|>{}<|im_end|>",
    ),
    "seed_oss": Form(
        "<seed:bos>{role}\n{}<seed:eos>", assistant="<seed:bos>assistant\n{t}<seed:eos>", reply="<seed:bos>assistant\n"
    ),
    "grok-2": Form(
        "System: {t}<|separator|>\n\n", "Human: {t}<|separator|>\n\n", "Assistant: {}<|separator|>\n\n", "Assistant:"
    ),
    "pangu-embedded": Form(
        "[unused9]系统：{}[unused10]", "[unused9]用户：{}[unused10]", "[unused9]助手：{}[unused10]", "[unused9]助手：",
        tool="[unused9]工具：{}[unused10]", without="[unused9]系统：[unused10]",
    ),
    "solar-open": Form("<|begin|>{role}<|content|>{}<|end|>", reply="<|begin|>assistant"),
}  # fmt: skip
TEMPLATES = {name: jinja(form) for name, form in FORMS.items()}
