"""Conversations: records of JSON or Parquet become tokens with marks, packed into windows.

A record has one of three forms: `messages`, `conversations`, or `prompt` and `completion`. The chat
template of the model makes it a text (`decod.data.template`), and the tokenizer makes that tokens.
Special tokens that are spelled out in the text count as such, as in transformers.

Targets are the tokens that stand for a part of an answer. An answer ends with the token that ends
its turn. A token that an answer shares with the text before it is a target, too. The first token of
a conversation is none, because nothing stands before it.

A window holds `sequence_length` tokens, and no conversation crosses its end. What is left of it is
padded. The conversations of a part are packed some millions of tokens at a time: the longest first,
each into the window with the least room that is enough. One more token ends the corpus, since a
microbatch reads the first token behind each window.
"""

import bisect
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from decod.data.block import OnRead
from decod.data.index import BEGINS, MARK_SHIFT, TARGET
from decod.data.sources import (
    BadRecordError,
    OnBad,
    Slice,
    fields_of,
    read_records,
    require_encodable,
)
from decod.data.tokenizer import (
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    FileTokenizer,
    Tokenizer,
    read_fields,
    read_template,
    token_text,
)
from decod.errors import DataError

TrainOn = Literal["answers", "all"]
Message = Mapping[str, Any]
Span = tuple[int, int]
"""The beginning and the end of an answer in a text, in characters."""

_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
}
"""The roles that templates know, by the names that records give them."""
_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools")
_FORMS = "give each as `messages`, `conversations`, or `prompt` and `completion`"

_BATCH_CONVERSATIONS = 256
_BATCH_MAX_CHARS = 2**20
_PACKED_MIN_TOKENS = 2**22
"""Tokens that are packed at a time, at least. More would need more memory, and gain nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How conversations become tokens."""

    template: str
    place: str
    """The file with the template."""
    tokens: dict[str, str]
    """The special tokens that the template may name."""
    sequence_length: int
    """Tokens of a window."""
    train_on: TrainOn


@dataclass(frozen=True, slots=True)
class Conversation:
    """A record, as a template takes it."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    num_given: int = 0
    """Number of messages at the beginning that ask for the rest. Their answers are no targets."""


def load_chat(
    choice: str, encoder: Tokenizer, *, sequence_length: int, train_on: TrainOn
) -> ChatConfig:
    """Return how conversations become tokens, by the template in the tokenizer's folder.

    Args:
        choice: The tokenizer, as `load_tokenizer` takes it.
        encoder: What it gave.
        sequence_length: Tokens of a window.
        train_on: Which tokens are targets.

    Raises:
        DataError: There is no template, or its tokens are not in the vocabulary.
    """
    path = Path(choice).expanduser()
    folder = path if path.is_dir() else path.parent
    config = read_fields(folder / TOKENIZER_CONFIG_FILE)
    template: Any = read_template(folder)
    place = folder / (TEMPLATE_FILE if template else TOKENIZER_CONFIG_FILE)
    template = template or config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    if not (isinstance(encoder, FileTokenizer) and isinstance(template, str) and template):
        raise DataError(
            f"{choice} has no chat template",
            why=f"--chat needs the {TEMPLATE_FILE} of the model, or the `chat_template` in its "
            f"{TOKENIZER_CONFIG_FILE}",
            fix="give the folder of a model for chat with --tokenizer, or put a template there",
            code="E-DAT-070",
        )
    tokens = {"eos_token": encoder.eos_token, "bos_token": encoder.bos_token}
    for fields in (read_fields(folder / SPECIAL_TOKENS_FILE), config):
        found = {name: token_text(value) for name, value in fields.items() if name[-6:] == "_token"}
        tokens |= {name: text for name, text in found.items() if text is not None}
    for name, text in tokens.items():
        if name in template and text and not encoder.knows(text):
            raise DataError(
                f"{folder / TOKENIZER_CONFIG_FILE} says that {name} is {text!r}",
                why="tokenizer.json has no such token: the files are of different models",
                fix="fetch both from the model again",
                code="E-DAT-015",
            )
    return ChatConfig(
        template=template,
        place=str(place),
        tokens=tokens,
        sequence_length=sequence_length,
        train_on=train_on,
    )


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation in a record. Raises BadRecordError."""
    tools = record.get("tools")
    tools = tools if isinstance(tools, list) and tools else None
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            return Conversation(tuple(_messages(record[name], name)), tools)
    if record.get("prompt") is None or record.get("completion") is None:
        raise BadRecordError(f"it is no conversation; {fields_of(record)}")
    given = tuple(_messages(record["prompt"], "prompt", "user"))
    asked = tuple(_messages(record["completion"], "completion", "assistant"))
    return Conversation(given + asked, tools, len(given))


def _messages(value: object, name: str, role: str | None = None) -> Iterator[Message]:
    """Yield the messages in a field of a record. A text alone is said by `role`."""
    if isinstance(value, str) and role is not None:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{name!r} is no list of messages")
    for number, each in enumerate(value, start=1):
        place = f"message {number} of {name!r}"
        if not isinstance(each, dict):
            raise BadRecordError(f"{place} is no object")
        said_by = each.get("role", each.get("from"))
        if not isinstance(said_by, str) or said_by not in _ROLES:
            raise BadRecordError(f"{place} has the role {said_by!r:.40}, not {', '.join(_ROLES)}")
        content = each.get("content", each.get("value"))
        if isinstance(content, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join(part["text"] for part in content)
        # An answer that only calls tools has no text.
        if not isinstance(content, str) and (content is not None or not each.get("tool_calls")):
            raise BadRecordError(f"{place} has no text as `content` or `value`")
        said = {"role": _ROLES[said_by], "content": content}
        rest = {key: each[key] for key in each if key not in ("role", "from", "content", "value")}
        yield {key: item for key, item in (said | rest).items() if item is not None}


class Renderer:
    """Renders conversations in a process of its own. As a context, it ends the process.

    Args:
        chat: Says how.

    Raises:
        DataError: The template can't be used.
    """

    def __init__(self, chat: ChatConfig) -> None:
        self._chat = chat
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "decod.data.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._ask({"source": chat.template, "tokens": chat.tokens})
        except BaseException:
            self.close()
            raise

    def render(self, record: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Return a record as text, and where the assistant's answers stand in it.

        Raises:
            BadRecordError: The record is no conversation, or the template refuses it.
            DataError: The template can't be used.
        """
        conversation = conversation_of(record)
        answer = self._ask(asdict(conversation))
        require_encodable(answer["text"])
        if answer["answers"] is None and self._chat.train_on == "answers":
            if conversation.messages[0]["role"] == "assistant":
                raise BadRecordError("it begins with an answer, to which nobody asks")
            raise DataError(
                f"the answers can't be told from the rest with the template in {self._chat.place}",
                why="it writes a message otherwise if other messages follow, as Qwen 3's does with "
                "thoughts",
                fix="put `{% generation %}` and `{% endgeneration %}` around what the assistant "
                "says in it, as the training templates of TRL do, or pass --train-on all",
                code="E-DAT-072",
            )
        return answer["text"], answer["answers"] or []

    def _ask(self, request: Mapping[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request, default=str).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            why = f"the process that renders it has ended with {code}"
            if code == -signal.SIGXCPU:
                why = "one conversation takes too long: it may loop for ever"
            raise self._unusable(why, "E-DAT-071")
        answer = json.loads(line)
        if "bad" in answer:
            raise BadRecordError(answer["bad"])
        if "fatal" in answer:
            raise self._unusable(answer["fatal"], "E-DAT-070")
        return answer

    def _unusable(self, why: str, code: str) -> DataError:
        return DataError(
            f"the chat template in {self._chat.place} cannot be used",
            why=why,
            fix="fetch the model's template again, or write one that does without that",
            code=code,
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def encode_conversations(
    part: Iterable[Slice],
    chat: ChatConfig,
    encoder: FileTokenizer,
    counts: Counter[str],
    *,
    on_read: OnRead | None = None,
    on_bad: OnBad | None = None,
) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the windows of some slices of files, as items: (T,), a multiple of a window.

    Args:
        part: The slices.
        chat: Says how.
        encoder: A tokenizer that knows special tokens in a text.
        counts: Counts fields of `ConversationCounts`.
        on_read: As for `read_records`.
        on_bad: As for `read_records`.

    Raises as `read_records`, and DataError if the template can't be used.
    """
    waiting: list[npt.NDArray[np.uint32]] = []
    num_tokens = 0
    with Renderer(chat) as renderer:
        rendered = (
            each
            for piece in part
            for each in read_records(piece, renderer.render, _COLUMNS, _FORMS, on_read, on_bad)
        )
        for batch in _batches(rendered):
            encoded = encoder.encode_with_offsets([text for text, _ in batch])
            for (ids, offsets), (_, answers) in zip(encoded, batch, strict=True):
                items = marked(ids, offsets, answers, chat, counts)
                if items.size:
                    waiting.append(items)
                    num_tokens += items.size
            if num_tokens >= _PACKED_MIN_TOKENS:
                yield _windows(waiting, chat.sequence_length, encoder.eos_id)
                waiting, num_tokens = [], 0
        if waiting:
            yield _windows(waiting, chat.sequence_length, encoder.eos_id)


def marked(
    ids: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    answers: Sequence[Span],
    chat: ChatConfig,
    counts: Counter[str],
) -> npt.NDArray[np.uint32]:
    """Return a conversation as items, (T,), cut to what fits into a window; none if nothing does.

    Args:
        ids: The tokens, (T,).
        offsets: Where the text of each begins and ends, in characters, (T, 2).
        answers: Where the answers stand, in characters.
        chat: Says what fits and what is a target.
        counts: Counts fields of `ConversationCounts`.
    """
    everything = chat.train_on == "all"
    marks = np.full(ids.size, TARGET if everything else 0, np.uint32)
    ends = []
    for begin, end in answers:
        # Tokens that stand for no character may lie between those that do.
        shared = np.minimum(offsets[:, 1], end) > np.maximum(offsets[:, 0], begin)
        within = np.flatnonzero(shared)
        if within.size:
            marks[within[0] : within[-1] + 1] = TARGET
            ends.append(int(within[-1]) + 1)
    marks[:1] = BEGINS
    size = ids.size
    if not (marks & TARGET).any():
        counts["num_unanswered"] += 1
        return ids[:0]
    if size > chat.sequence_length:
        size = max((end for end in ends if end <= chat.sequence_length), default=0)
        counts["num_cut" if size else "num_too_long"] += 1
        counts["num_tokens_lost"] += ids.size - size
    counts["num_conversations"] += size > 0
    counts["num_tokens"] += size
    return (ids | marks << np.uint32(MARK_SHIFT))[:size]


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return which of some conversations share a window, by their places in `sizes`, in order.

    Args:
        sizes: Their sizes, at most `room` each.
        room: The size of a window.
    """
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """The room that is left in windows, with their numbers, sorted."""
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        found = bisect.bisect_left(rooms, (sizes[place], -1))
        left, window = rooms.pop(found) if found < len(rooms) else (room, len(windows))
        if window == len(windows):
            windows.append([])
        windows[window].append(place)
        bisect.insort(rooms, (left - sizes[place], window))
    return sorted(sorted(each) for each in windows)


def padding(num_tokens: int, eos_id: int) -> npt.NDArray[np.uint32]:
    """Return items that fill a window, (T,). No conversation is continued there."""
    items = np.full(num_tokens, eos_id, np.uint32)
    items[:1] |= np.uint32(BEGINS << MARK_SHIFT)
    return items


def _windows(
    conversations: Sequence[npt.NDArray[np.uint32]], room: int, eos_id: int
) -> npt.NDArray[np.uint32]:
    rows = []
    for window in pack([each.size for each in conversations], room):
        rows += [conversations[place] for place in window]
        rows.append(padding(room - sum(conversations[place].size for place in window), eos_id))
    return np.concatenate(rows)


def _batches(rendered: Iterable[tuple[str, list[Span]]]) -> Iterator[list[tuple[str, list[Span]]]]:
    batch: list[tuple[str, list[Span]]] = []
    num_chars = 0
    for each in rendered:
        batch.append(each)
        num_chars += len(each[0])
        if num_chars >= _BATCH_MAX_CHARS or len(batch) == _BATCH_CONVERSATIONS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
