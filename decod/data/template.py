"""Chat templates: how a model's folder says that a conversation becomes one text.

A template is a program in the language of jinja2, and comes with a model from strangers. So it is
run in jinja2's sandbox, in a process of its own, `python -m decod.data.template`. That can open no
file, and the system kills it if one rendering takes more than `RENDER_MAX_S` of processor time. Its
memory and its output are bounded.

The process reads lines of JSON and answers each with one. The first line is the template. The
others are conversations. An answer holds the text and the places of the assistant's answers in it,
or `bad`, why the template refuses this conversation, or `fatal`, why it can't be used at all.

A template may state what the assistant says, with the block `{% generation %}`. Otherwise the
beginnings of a conversation are rendered one by one. An answer is what its message adds to the
text that asks for it. This holds only if the template renders a message the same whatever follows.

Templates get the functions that transformers gives them. `strftime_now` always tells the same day,
because the same files must give the same tokens on every day and host.
"""

import functools
import json
import re
import resource
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

RENDER_MAX_S = 5
"""Processor time of one rendering. An ordinary one takes less than a millisecond."""
TEXT_MAX_CHARACTERS = 2**24
_MEMORY_MAX_BYTES = 2**31

TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""The date that Llama's templates state if nobody tells them one."""

Message = Mapping[str, Any]
Span = tuple[int, int]
"""The beginning and the end of an answer in a text, in characters."""


class TemplateError(Exception):
    """Says why a template can't be used."""


class RefusedError(Exception):
    """Says why a template refuses a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[Span, ...] | None
    """What the assistant says, one for each answer, in order. None: that can't be told."""


class _Generation(Extension):
    """The block `{% generation %}`. Puts marks around its text, which are taken out in the end."""

    tags = {"generation"}  # noqa: RUF012 - as the class above declares it.
    # No conversation can hold them.
    marks = (f"\ufdd0{secrets.token_hex(8)}", f"\ufdd1{secrets.token_hex(8)}")

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return self.marks[0] + caller() + self.marks[1]


class _Namespace(jinja2.utils.Namespace):
    """A namespace without attributes that lead into Python, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute {name!r}")
        super().__setitem__(name, value)


class _Dict:
    """Makes dicts, and has no other attribute of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: object) -> None:
    raise RefusedError(f"the template says: {message}")


class ChatTemplate:
    """A template, ready to render.

    Args:
        source: Its text.
        tokens: The special tokens that it may name, such as `bos_token`.
        begin: Called before each rendering.

    Raises:
        TemplateError: It is no template, or reads other files.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": TODAY.strftime,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        try:
            tree = environment.parse(source)
            foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
            if (node := next(tree.find_all(foreign), None)) is not None:
                raise TemplateError(f"its line {node.lineno} reads another file")
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"it is no template of jinja2: {_one_line(error)}") from error
        self._tokens = dict(tokens)
        self._begin = begin
        self._states_answers = re.search(r"\{%[-+]?\s*generation\b", source) is not None

    def render(
        self, messages: Sequence[Message], *, tools: object = None, num_given: int = 0
    ) -> Rendered:
        """Return a conversation as text.

        Args:
            messages: Its messages, each with a role.
            tools: What the template gets as `tools`.
            num_given: Number of messages at the beginning whose answers do not count.

        Raises:
            RefusedError: The template refuses the conversation.
            TemplateError: The template does what it must not do.
        """
        text, answers = self._rendered(messages, tools)
        if self._states_answers:
            given = self._rendered(messages[:num_given], tools)[1] if num_given else []
            return Rendered(text, tuple(answers[len(given) :]))
        found = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place >= num_given:
                span = self._answer(text, messages[: place + 1], tools)
                if span is None:
                    return Rendered(text, None)
                found.append(span)
        return Rendered(text, tuple(found))

    def _answer(self, text: str, messages: Sequence[Message], tools: object) -> Span | None:
        """Return where the last of the first messages of a text stands, if it can be told."""
        try:
            before, _ = self._rendered(messages[:-1], tools, add_generation_prompt=True)
            up_to, _ = self._rendered(messages, tools)
        except RefusedError:
            return None
        if not (text.startswith(up_to) and up_to.startswith(before)):
            return None
        return len(before), len(up_to)

    def _rendered(
        self, messages: Sequence[Message], tools: object, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        self._begin()
        parts = []
        num_characters = 0
        try:
            for part in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            ):
                num_characters += len(part)
                _require_short(num_characters)
                parts.append(part)
        except (TemplateError, RefusedError, MemoryError):
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(f"it does what the sandbox forbids: {_one_line(error)}") from error
        # A template is a program, and may fail in any way.
        except Exception as error:
            reason = f"the template fails: {type(error).__name__}: {_one_line(error)}"
            raise RefusedError(reason) from error
        return _take_out("".join(parts))


def _require_short(num_characters: int) -> None:
    if num_characters > TEXT_MAX_CHARACTERS:
        why = f"it makes more than {TEXT_MAX_CHARACTERS} characters of one conversation"
        raise TemplateError(why)


def _take_out(marked: str) -> tuple[str, list[Span]]:
    """Return a text without marks, and what they enclosed."""
    first, last = _Generation.marks
    text = ""
    spans = []
    begin = 0
    for part in re.split(f"({first}|{last})", marked) if first in marked else [marked]:
        if part == first:
            begin = len(text)
        elif part == last:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _limit_time() -> None:
    """Have the system kill this process if it uses much more processor time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _bound(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + RENDER_MAX_S + 1)


def _limit() -> None:
    """Take from this process what a template has no need of."""
    _bound(resource.RLIMIT_AS, _MEMORY_MAX_BYTES)
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        _bound(what, 0)
    _limit_time()


def _bound(what: int, most: int) -> None:
    """Have the system give this process at most so much of something."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer lines on standard input until it ends."""
    # Python and jinja2 import some modules when they need them, and files can't be opened then.
    ChatTemplate(r"{{ '\n' | pprint }}{{ strftime_now('%Y') }}", {}).render([])
    _limit()
    template: ChatTemplate | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if template is None:
                template = ChatTemplate(**request, begin=_limit_time)
            else:
                rendered = template.render(**request)
                answer = {"text": rendered.text, "answers": rendered.answers}
        except RefusedError as error:
            answer = {"bad": str(error)}
        except MemoryError:
            answer = {"fatal": "it takes too much memory for one conversation"}
        except (TemplateError, RecursionError) as error:
            answer = {"fatal": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
