"""Writing of a run file with every key, its default, and a comment.

The comments are the field docstrings in the owners' source, so each text exists only once.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from decod.config.card import CardConfig
from decod.config.evaluation import EvaluationConfig
from decod.config.run_file import DataSource
from decod.config.usual import USUAL_KEYS, with_usual
from decod.run.run_config import RunConfig
from decod.train.checkpoint.store import CheckpointConfig

_WIDTH = 98

_HEAD = """\
# A decod run. Start it with `decod leader THIS_FILE`; every volunteer gets these values from there.
# A key that is left out has its default, which `decod run init` without --preset writes.
"""

_USUAL = (
    "If the next keys are left out, they follow from num_iterations: a fiftieth of it is the "
    "warm-up, at most 2000 iterations, and the rate then falls as a cosine until its end. While it "
    "is 0, the warm-up is 100 iterations, and the rate stays. Take away the # to choose."
)


@cache
def field_comments(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]  # A class definition, by construction.
    comments = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(comment))),
            ):
                comments[name] = " ".join(comment.split())
    return comments


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # An ASCII string in JSON is also a basic string in TOML.
        return json.dumps(str(value))
    return repr(value)


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _key_lines(cls: type, values: Any, left_out: Mapping[str, Any] | None = None) -> list[str]:
    """Return the lines of a section.

    Args:
        cls: Of the section.
        values: Of its keys.
        left_out: Keys that are written behind a #, with what counts then.
    """
    left_out = left_out or {}
    hints = get_type_hints(cls)
    comments = field_comments(cls)
    lines = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            continue
        comment = comments[field.name]
        if issubclass(hint, Enum):
            comment += " One of: " + ", ".join(str(member.value) for member in hint) + "."
        if field.name == next(iter(left_out), None):
            lines += _comment_lines(_USUAL)
        lines += _comment_lines(comment)
        value = left_out.get(field.name, getattr(values, field.name))
        mark = "# " if field.name in left_out else ""
        lines.append(f"{mark}{field.name} = {_toml_value(value)}")
    return lines


def render_run_file(
    run: RunConfig | None = None,
    data: DataSource | None = None,
    checkpoint: CheckpointConfig | None = None,
    card: CardConfig | None = None,
    evaluation: EvaluationConfig | None = None,
    *,
    leaves_usual: bool = False,
) -> str:
    """Return the text of a run file. Reading it back gives the same values.

    Args:
        run: Values to write; the defaults if absent.
        data: The place of the data; the default corpus if absent.
        checkpoint: When the run's state is kept; the defaults if absent.
        card: What the exported model's card says; the defaults if absent.
        evaluation: What is measured on held-out text; the defaults if absent.
        leaves_usual: Leave out what follows from the length of the run. See `decod.config.usual`.
    """
    run = run or RunConfig()
    usual = _usual_of(run) if leaves_usual else {}
    hints = get_type_hints(RunConfig)
    comments = field_comments(RunConfig)
    lines = [_HEAD, *_key_lines(RunConfig, run)]
    sections = [
        (name, comments[name], hints[name], getattr(run, name))
        for name in hints
        if dataclasses.is_dataclass(hints[name])
    ]
    sections += [
        (
            "data",
            "Where this host's data is. This part and those below may differ from host to host.",
            DataSource,
            data or DataSource(),
        ),
        (
            "checkpoint",
            "When the leader keeps the run's state on its disk, to go on from after a stop.",
            CheckpointConfig,
            checkpoint or CheckpointConfig(),
        ),
        (
            "card",
            "What the card of the exported model says beside what decod knows.",
            CardConfig,
            card or CardConfig(),
        ),
        (
            "evaluation",
            "What the leader measures on text that the model is not trained with.",
            EvaluationConfig,
            evaluation or EvaluationConfig(),
        ),
    ]
    for name, comment, cls, values in sections:
        assert isinstance(cls, type)
        left_out = usual if name == "optimizer" else {}
        lines += ["", *_comment_lines(comment), f"[{name}]", *_key_lines(cls, values, left_out)]
    return "\n".join(lines) + "\n"


def _usual_of(run: RunConfig) -> dict[str, Any]:
    sync = {"method": run.sync.method.value, "compression": run.sync.compression.value}
    found = with_usual({"num_iterations": run.num_iterations, "sync": sync})["optimizer"]
    return {key: found[key] for key in USUAL_KEYS}
