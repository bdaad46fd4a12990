"""Folders of models for chat, with small vocabularies, and conversations of all kinds."""

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from decod.data.byte_level import SPLITS

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TRAINING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
_MISTRAL_TRAINING = MISTRAL.replace(
    "{{ message['content'] + eos_token}}",
    "{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}",
)


def templates(name: str) -> tuple[str, str]:
    """Return a template as published, and one that states what the assistant says."""
    if name == "chatml":
        return CHATML, _CHATML_TRAINING
    if name == "mistral":
        return MISTRAL, _MISTRAL_TRAINING
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    first, second = (folder / f"{name}{end}.jinja" for end in ("", "_training"))
    return first.read_text(), second.read_text()


_SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "qwen3": ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}
"""The special tokens of models: the first begins a text, the second ends a turn or a text."""


def write_chat_model(folder: Path, name: str, template: str | None = None) -> Path:
    """Write the tokenizer and the template of a model into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    special = list(_SPECIAL[name])
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=name in ("mistral", "gemma")))
    common: dict[str, Any] = {"vocab_size": 700, "show_progress": False, "special_tokens": special}
    if name in ("mistral", "gemma"):
        # As the files that transformers made of models of SentencePiece.
        steps = [normalizers.Replace(" ", "▁")]
        if name == "mistral":
            steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Replace("▁", " ")
        common["special_tokens"] = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        common["max_token_length"] = 8
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(SPLITS["Qwen2, Qwen3"]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        tokenizer.decoder = decoders.ByteLevel()
        common["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        if name == "qwen3":
            tokenizer.normalizer = normalizers.NFC()
    draw = random.Random(1)
    texts = ["\n".join(text_of(draw) for _ in range(20)) for _ in range(60)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**common))
    if name in ("mistral", "gemma"):
        # Bytes are no special tokens, only what is left of characters that nobody knows.
        fields = json.loads(tokenizer.to_str())
        fields["added_tokens"] = fields["added_tokens"][: len(special)]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    if name == "llama3":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": {"content": special[1], "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template or templates(name)[0])
    return folder


_PIECES = (
    *(
        "hello",
        " world",
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        "é",
        "e\u0301",
        "日本",
        "👩‍👩‍👧",
        "'s",
        "12",
        "</s>",
    ),
    *("<|im_end|>", "{{ x }}", "\u3000", "\xa0", ".", "?", "[INST]", "ž", "\r\n", "<0x0A>", "▁"),
)


def text_of(draw: random.Random) -> str:
    """Return some words, marks and spaces; sometimes nothing."""
    return "".join(draw.choices(_PIECES, k=draw.choice((0, 1, 2, 3, 5, 8, 20))))


def conversation(draw: random.Random, name: str, *, num_turns: int = 0) -> list[dict[str, str]]:
    """Return a conversation that the template of a model takes."""
    messages = []
    if name in ("chatml", "qwen3", "llama3") and draw.random() < 0.4:
        messages.append({"role": "system", "content": text_of(draw)})
    for _ in range(num_turns or draw.randint(1, 5)):
        messages.append({"role": "user", "content": text_of(draw)})
        messages.append({"role": "assistant", "content": text_of(draw)})
    return messages
