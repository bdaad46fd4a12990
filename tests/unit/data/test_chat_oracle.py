"""Tokens and targets of conversations are those of transformers and TRL."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decod.data.chat import ChatConfig, Renderer, load_chat, marked
from decod.data.index import BEGINS, MARK_SHIFT, TARGET
from decod.data.tokenizer import FileTokenizer
from tests.support.chat_models import conversation, templates, write_chat_model

NUM_QUICK = 30


def tokenizer_of(folder: Path) -> FileTokenizer:
    content = (folder / "tokenizer.json").read_bytes()
    return FileTokenizer(content, eos=0, name="NAME", special_in_text=True)


def ours(
    records: list[list[dict[str, str]]], chat: ChatConfig, encoder: FileTokenizer
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and marks of conversations."""
    found = []
    with Renderer(chat) as renderer:
        for messages in records:
            text, answers = renderer.render({"messages": messages})
            [(ids, offsets)] = encoder.encode_with_offsets([text])
            items = marked(ids, offsets, answers, chat, Counter())
            found.append(((items & 0xFFFFFF).tolist(), (items >> MARK_SHIFT).tolist()))
    return found


def oracle(folder: Path, template: str) -> Any:
    """Return the tokenizer of transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=_special(folder)["bos_token"],
        eos_token=_special(folder)["eos_token"],
        chat_template=template,
    )


def _special(folder: Path) -> dict[str, str]:
    encoder = tokenizer_of(folder)
    return load_chat(str(folder), encoder, sequence_length=2**20, train_on="answers").tokens


@pytest.mark.parametrize(
    "num", [NUM_QUICK, pytest.param(1000, marks=pytest.mark.slow)], ids=["quick", "whole"]
)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "chatml", "mistral", "gemma"])
def test_tokens_and_targets_are_those_of_trl(tmp_path: Path, name: str, num: int) -> None:
    pytest.importorskip("trl")
    published, training = templates(name)
    draw = random.Random(f"{name} {num}")
    # Qwen 3 takes the thoughts out of earlier turns, so only its training template has more turns.
    cases = [(training, [conversation(draw, name) for _ in range(num)])]
    turns = 1 if name == "qwen3" else 0
    cases.append((published, [conversation(draw, name, num_turns=turns) for _ in range(num)]))
    for template, records in cases:
        folder = write_chat_model(tmp_path / "model", name, template)
        encoder = tokenizer_of(folder)
        chat = load_chat(str(folder), encoder, sequence_length=2**20, train_on="answers")
        theirs = oracle(folder, training)
        num_targets = 0
        for messages, (ids, marks) in zip(records, ours(records, chat, encoder), strict=True):
            wanted = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            assert ids == wanted["input_ids"], messages
            assert [mark & TARGET for mark in marks] == wanted["assistant_masks"], messages
            assert [mark & BEGINS for mark in marks] == [BEGINS] + [0] * (len(marks) - 1)
            num_targets += sum(wanted["assistant_masks"])
        assert num_targets > 10 * num


def test_calls_of_tools_are_rendered_and_learnt(tmp_path: Path) -> None:
    """Whatever else a message holds reaches the template."""
    pytest.importorskip("trl")
    training = templates("qwen3")[1]
    folder = write_chat_model(tmp_path / "model", "qwen3", training)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "The tool said 3."},
    ]
    encoder = tokenizer_of(folder)
    chat = load_chat(str(folder), encoder, sequence_length=2**20, train_on="answers")
    with Renderer(chat) as renderer:
        text, answers = renderer.render({"messages": messages, "tools": tools})
    wanted = oracle(folder, training).apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    [(ids, offsets)] = encoder.encode_with_offsets([text])
    items = marked(ids, offsets, answers, chat, Counter())
    assert (items & 0xFFFFFF).tolist() == wanted["input_ids"]
    assert (items >> MARK_SHIFT & TARGET).tolist() == wanted["assistant_masks"]
    assert '"name": "add", "arguments": {"a": 1, "b": [2, null]}' in text


def test_a_token_that_an_answer_shares_is_a_target(tmp_path: Path) -> None:
    """The tokenizer joins the line ends before an answer with those at its beginning."""
    folder = write_chat_model(tmp_path / "model", "chatml")
    encoder = tokenizer_of(folder)
    chat = load_chat(str(folder), encoder, sequence_length=2**20, train_on="answers")
    with Renderer(chat) as renderer:
        text, [(begin, end)] = renderer.render({"prompt": "a", "completion": "\nb 👩"})
    assert text[begin:end] == "\nb 👩<|im_end|>\n"
    [(ids, offsets)] = encoder.encode_with_offsets([text])
    shared = [n for n, (first, last) in enumerate(offsets.tolist()) if first < begin < last]
    assert len(shared) == 1, "the vocabulary has a token of two line ends"
    targets = np.flatnonzero(
        marked(ids, offsets, [(begin, end)], chat, Counter()) >> MARK_SHIFT & TARGET
    )
    assert targets.tolist() == list(range(shared[0], len(ids)))
    # A boundary within a character of several tokens takes all of them.
    place = text.index("👩")
    only = marked(ids, offsets, [(place, place + 1)], chat, Counter()) >> MARK_SHIFT & TARGET
    parts = [n for n, (first, _) in enumerate(offsets.tolist()) if first == place]
    assert len(parts) > 1
    assert np.flatnonzero(only).tolist() == parts
