"""The recipes do what they say: their commands, typed into shells, on tiny models and loopback.

`tests/support/recipes.py` says how a page marks its blocks.
"""

import json
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from tests.support.exports import MODEL, make_corpus, make_export
from tests.support.oracle import load_transformers
from tests.support.peft_reference import load_peft
from tests.support.recipes import (
    Kind,
    Rehearsal,
    blocks_of,
    check_options,
    decod_commands,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.stem: path.read_text("utf-8")
    for path in (*sorted((ROOT / "docs/recipes").glob("*.md")), ROOT / "docs/agent.md")
}

SUBSTITUTIONS = (
    (r"--device cuda:\d", "--device cpu"),
    (r"--listen 0\.0\.0\.0:\d+", "--listen 127.0.0.1:0"),
    (r"--advertise \S+", ""),
    (r"--threads \d+", "--threads 1"),
    (r"--max-tokens \d+", "--max-tokens 8"),
    (r"--sequence-length \d+", "--sequence-length 32"),
    (r"examples/", f"{ROOT}/examples/"),
    # Tests may run as root, whose services are those of the machine.
    (r"service install --print", "service install --user --print"),
    # The hour and the state of the test's host are no part of a recipe.
    (r"--pause-when \S+", "--pause-when none"),
    (r"22:00-07:00", "00:00-24:00"),
    # Other hosts are folders beside this one.
    (r"scp -r (.+) (\w+)\.example\.org:", r"cp -r \1 ../\2/"),
    (r"\| mail .*", "| cat"),
)
"""What stands in a recipe, and what a test types instead: addresses, paths, sizes."""

SIZES: dict[str, dict[str, Any]] = {
    "model": {
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": MODEL.vocab_size,
        "hidden_size": MODEL.hidden_size,
        "intermediate_size": MODEL.intermediate_size,
        "num_hidden_layers": MODEL.num_hidden_layers,
        "num_attention_heads": MODEL.num_attention_heads,
        "num_key_value_heads": MODEL.num_key_value_heads,
        "max_position_embeddings": MODEL.max_position_embeddings,
    },
    "stages": {"num_relay_stages": 1},
    "batch": {"sequence_length": 32, "microbatch_size": 2, "num_microbatches": 4},
    "protocol": {
        "min_nodes_per_stage": 1,
        "heartbeat_timeout_s": 5.0,
        "admission_interval_s": 0.2,
        "utilisation_interval_s": 0.5,
    },
}
"""Values of every run file."""

SIZES_IF_GIVEN = {("sync", "every"): 3, ("sync", "rank"): 4, ("evaluation", "every_iterations"): 5}
"""Values of run files whose recipe sets these keys."""

LEADER = """
<!-- recipe: run at organiser -->
```sh
decod data prepare corpus/ texts/
decod run init run.toml
```

<!-- recipe: edit run.toml at organiser -->
```toml
name = "before"

[data]
path = "corpus"
```

<!-- recipe: run at organiser -->
```sh
decod leader run.toml
```

<!-- recipe: run at other -->
```sh
decod join JOINSTRING
```
"""
"""The run of somebody else, which some recipes are about."""


def join_file(host: str) -> str:
    return (
        f'<!-- recipe: run at {host} -->\n```sh\n(umask 077; echo "JOINSTRING" > join.txt)\n```\n'
    )


BEFORE = {
    "two-gpus-at-home": LEADER + join_file("home") + join_file("work"),
    "only-at-night": LEADER + join_file("you"),
    "agent": LEADER + join_file("agent"),
    "move-a-run": LEADER.replace("at organiser", "at old"),
}
"""What has happened before a recipe begins."""

SHARED_FILES = {"spot-instances": ("leader/join.txt", ("server-a", "server-b", "spot"))}
"""Files that a recipe tells its reader to copy in words: where from, and to which hosts."""

SEEN = {
    "agent": r"left the run",
    "class-of-laptops": r"run class +(training|aggregating)",
    "fine-tune": r"iteration \d+ is in \S+/tuned",
    "move-a-run": r"resuming after iteration \d+, loss",
    "only-at-night": r"changed by the operator: schedule",
    "own-loop": r"round \d+: loss \S+, 2 hosts",
    "second-data-node": r"\(term [2-9]\)",
    "slow-home-links": r"averaging every \d+ iterations",
    "spot-instances": r"joins run spot as",
    "two-gpus-at-home": r"home-1 joins run before as",
    "watch-a-run": r"decod_iteration \d",
}
"""What a recipe's commands and nodes must have shown."""

QUICK = ("agent", "class-of-laptops")
"""Recipes that are played in every run of the tests. Others take longer, or show less."""


FIRST_HALF_HOUR = (
    (("README.md", "Install it"), ("docs/organise.md", "Your first half hour")),
    (
        r"iterations with five nodes take about \d minutes",
        r"the run's page(?: is at|:) http://127\.0\.0\.1:\d+/",
        r"one relay lost on the way",
        r"\S+ has entered as a data node\. Hand out the join strings below",
        r"this node leads the run now, in term 2",
        r"run \S+ goes on at \S+: this node joins it again",
        r"\S+ is the last member of stage 2: it waits until another host has taken",
        r"waiting for another member of stage 2: leaves in \d+ s at the latest",
        r"the last member of stage 2 is leaving",
        r"left the run: finished what it held, and left",
        r"iteration \d+ is in \S+/model",
    ),
)
"""Sections of pages that are played, and what a new user must have been shown in them."""

NOT_SEEN = r"error: |STAGE \d LOST|Traceback|a second run"
"""What a new user must not be shown in them."""


def write_inputs(home: Path) -> None:
    """Write what a recipe expects its reader to have: texts, and a model in their folders."""
    generator = np.random.default_rng(3)
    words = ["alpha", "beta", "gamma", "delta", "run", "stage", "flow", "node", "of", "the"]
    text = " ".join(words[index] for index in generator.integers(0, len(words), 20_000))
    (home / "texts").mkdir(parents=True)
    (home / "texts" / "words.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    (home / "held-out.txt").write_text(text[len(text) // 2 :], encoding="utf-8")
    make_export(home / "tinyllama", make_corpus(home / "tinyllama-corpus"))
    (home / "tinyllama/chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.role[0] + each.content + eos_token }}{% endfor %}"
    )
    for name, num in (("chats", 400), ("held-out", 40)):
        asked = [{"role": "user", "content": words[index % 7]} for index in range(num)]
        told = [{"role": "assistant", "content": words[-index % 7]} for index in range(num)]
        pairs = [{"messages": pair} for pair in zip(asked, told, strict=True)]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def resized(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an edit, with those of a tiny run."""
    found = dict(values)
    for (section, key), value in SIZES_IF_GIVEN.items():
        if key in found.get(section, {}):
            found[section] = found[section] | {key: value}
    for section, sizes in SIZES.items():
        found[section] = found.get(section, {}) | sizes
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def adapted(text: str, *, page_port: int) -> str:
    """Return a block's text with the substitutions made."""
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text.replace("127.0.0.1:7780", f"127.0.0.1:{page_port}")


def played(name: str) -> Any:
    """A recipe as a parameter, whose id says what of it is run."""
    counts = Counter(block.kind for block in blocks_of(PAGES[name]))
    parts = [f"{name}: {counts[Kind.RUN]} blocks run"]
    parts += [f"{counts[kind]} {kind.value} only" for kind in (Kind.OPTIONS,) if counts[kind]]
    parts += [f"{counts[kind]} {kind.value}" for kind in (Kind.NOT_RUN,) if counts[kind]]
    marks = () if name in QUICK else (pytest.mark.slow,)
    return pytest.param(name, id=", ".join(parts), marks=marks)


@pytest.mark.parametrize(
    "name",
    [
        played(name)
        for name, page in PAGES.items()
        if any(block.kind is Kind.RUN for block in blocks_of(page))
    ],
)
def test_a_recipe_works(name: str, tmp_path: Path) -> None:
    blocks = [*blocks_of(BEFORE.get(name, "")), *blocks_of(PAGES[name])]
    adapt: Callable[[str], str] = partial(adapted, page_port=free_port())
    with Rehearsal(tmp_path, adapt=adapt, resize=resized) as rehearsal:
        first = next(block.host for block in blocks if block.host)
        write_inputs(rehearsal.home(first))
        if name in SHARED_FILES:
            source, hosts = SHARED_FILES[name]
            for host in hosts:
                (rehearsal.home(host) / Path(source).name).symlink_to(tmp_path / source)
        rehearsal.play(blocks)
        assert re.search(SEEN[name], rehearsal.shown()), rehearsal.shown()
        if name == "fine-tune":
            home = rehearsal.home(first)
            require_loads(home / "tuned", home / "tinyllama")


def require_loads(adapter: Path, base: Path) -> None:
    """Have PEFT load an adapter that has learnt something."""
    model = load_peft(load_transformers(base), adapter)
    learnt = [each for name, each in model.named_parameters() if "lora_B" in name]
    assert learnt
    assert all(each.any() for each in learnt)


def section_of(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def copy_source(folder: Path) -> None:
    """Copy what git would give a new user."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_user_s_half_hour_goes_as_the_pages_say(tmp_path: Path) -> None:
    """Install, demo, a run that loses its leader and a stage's last relay, export.

    `-s` shows all that the new user sees.
    """
    places, seen = FIRST_HALF_HOUR
    install, hours = (
        blocks_of(section_of((ROOT / page).read_text("utf-8"), title)) for page, title in places
    )
    with Rehearsal(
        tmp_path, adapt=str, resize=dict, python=tmp_path / "source/.venv/bin/python"
    ) as rehearsal:
        copy_source(rehearsal.home("source"))
        try:
            rehearsal.play(install)
        except AssertionError as error:
            if "No matching distribution found" in str(error):
                pytest.skip("no package index can be reached, so decod can't be installed")
            raise
        rehearsal.play(hours)
        shown = rehearsal.shown()
        print(shown)
        missing = [text for text in seen if not re.search(text, shown)]
        assert not missing, shown
        assert not re.findall(NOT_SEEN, shown), shown


@pytest.mark.parametrize("name", PAGES, ids=[f"{name}: options only" for name in PAGES])
def test_the_parser_takes_every_command_of_a_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the commands that are played, as they stand on the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    commands = [
        command for block in blocks_of(PAGES[name]) for command in decod_commands(block.text)
    ]
    for command in commands:
        check_options(command)
    assert commands or name == "own-loop"


def test_the_parser_refuses_an_invented_option() -> None:
    with pytest.raises(click.UsageError, match="--fast"):
        check_options(["join", "JOINSTRING", "--fast"])
    with pytest.raises(click.UsageError, match="--fast"):
        check_options(["service", "install", "join", "JOINSTRING", "--fast"])
    with pytest.raises(click.UsageError):
        check_options(["token", "forge"])
