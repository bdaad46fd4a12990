"""The documents tell the truth: commands, exit codes, the tree of packages, the wire format."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import click
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from decod.cli.main import COMMANDS, cli
from decod.config.run_file import render_run_file
from decod.errors import DecodError
from decod.exit_codes import MEANINGS, ExitCode
from decod.installation import DISTRIBUTION
from tests.support.machines import PROTOCOL, core_files, machine_files, machines_of

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos/decod/wire/v1").glob("*.proto"))


def architecture() -> str:
    return (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def commands_below(name: str, command: click.Command) -> dict[str, click.Command]:
    """Return what can be typed, by its words: the command, or those of a group."""
    if not isinstance(command, click.Group):
        return {name: command}
    found = {name: command} if command.invoke_without_command else {}
    for child, below in command.commands.items():
        found |= commands_below(f"{name} {child}", below)
    return found


@cache
def all_commands() -> dict[str, click.Command]:
    """`leader`, `data prepare` and so on: whatever can be typed behind `decod`."""
    found = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found |= commands_below(name, command)
    return found


def reference() -> str:
    """The reference, and that of the lab."""
    pages = ("docs/reference.md", "docs/research/lab.md")
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)


def section_of(text: str, heading: str) -> str:
    """What stands below a heading of the third level, up to the next heading."""
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference.md has no section {heading}"
    return found[1]


@pytest.mark.parametrize("name", all_commands())
def test_every_command_is_in_the_reference_with_its_options(name: str) -> None:
    """In its usage, or in the first column of its section's tables.

    `leader` and `join` share one table.
    """
    section = section_of(reference(), f"`decod {name}`")
    if "(#node-options)" in section:
        section += section_of(reference(), "Node options")
    options = {
        spelling
        for parameter in all_commands()[name].params
        if isinstance(parameter, click.Option)
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    usage = re.findall(r"^    decod .*", section, re.MULTILINE)
    named = re.findall(r"`(--?[a-z][a-z-]*)", " ".join(cells))
    named += re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", " ".join(usage))
    assert set(named) == options


def test_every_command_of_the_reference_exists() -> None:
    named = set(re.findall(r"^### `decod ([a-z -]+)`$", reference(), re.MULTILINE))
    assert named == set(all_commands())


def test_every_key_of_the_run_file_is_in_the_reference_with_its_default() -> None:
    part = reference().partition("\n## The run file\n")[2].partition("\n## ")[0]
    lines = []
    for line in part.splitlines():
        if heading := re.match(r"### `(\[\w+\])`", line):
            lines.append(heading[1])
        elif row := re.match(r"\| `(\w+)` \| `(.*?)` \|", line):
            lines.append(f"{row[1]} = {row[2]}")
    # Keys without a constant default stand behind a #.
    text = re.sub(r"(?m)^# (\w+ = \S+)$", r"\1", render_run_file(leaves_usual=True))
    assert tomllib.loads("\n".join(lines)) == tomllib.loads(text)


def test_every_command_explains_itself_with_an_example() -> None:
    for name, command in all_commands().items():
        help_text = command.help or ""
        assert f"decod {name}" in help_text, f"{name} has no example in its help"


def test_every_exit_code_is_in_the_reference() -> None:
    """As a row of a table that starts with the number and its meaning: `| 3 | ...`."""
    rows = dict(re.findall(r"^\|\s*`?(\d+)`?\s*\|\s*(.*)", reference(), re.MULTILINE))
    assert {int(number) for number in rows} == set(MEANINGS) == set(ExitCode)
    for code, meaning in MEANINGS.items():
        assert rows[str(int(code))].startswith(meaning)


def _subclasses(cls: type[DecodError]) -> list[type[DecodError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in _subclasses(child))]


@pytest.mark.parametrize("cls", _subclasses(DecodError), ids=lambda cls: cls.__name__)
def test_every_error_has_a_documented_exit_code_and_says_when_it_comes(
    cls: type[DecodError],
) -> None:
    assert cls.exit_code in MEANINGS
    assert cls.__doc__


def test_the_tree_of_packages_is_the_tree_on_disk() -> None:
    """Lines such as `  protocol/  the core` in the block that starts with `decod/`."""
    block = re.search(r"^```[a-z]*\n(decod/.*?)^```", architecture(), re.MULTILINE | re.DOTALL)
    assert block, "no block starts with decod/"
    listed = set(re.findall(r"^\s+([a-z_]+)/", block[1], re.MULTILINE))
    on_disk = {path.parent.name for path in (ROOT / "decod").glob("*/__init__.py")}
    assert listed == on_disk


STRANGERS_PACKAGE = re.compile(
    r"""\b(?:pip3?|pipx|uvx?|poetry|pdm|conda|mamba)\b[^\n`|;&]*?   # An installer, its command,
        [ ]['"]?decod(?!'s)(?=$|[\s'"`;,)<>=!~@\[]|[.]\W)           # and the name alone.
      | \bdecod\[[a-z]                                           # The name with an extra.
      | ^\s*['"]?decod\s*(?:==|>=|~=|@\s)                          # A line of requirements.
    """,
    re.VERBOSE | re.MULTILINE,
)
"""Advice to install `decod` from an index, where that name is another project's."""


@pytest.mark.parametrize(
    ("text", "is_advice"),
    [
        ("pip install 'decod[nat]'", True),
        ("run `pip install decod`", True),
        (".venv/bin/python -m pip install -U decod. Then", True),
        ("pip install --upgrade decod==0.1", True),
        ("uvx decod demo", True),
        ("uv pip install decod, and join", True),
        ("uv add decod", True),
        ("install decod[nat]", True),
        ('"decod>=0.1",', True),
        ("pip install -c constraints.txt -e '.[nat]' in the folder of decod's source", False),
        ("pip install -e . && decod demo", False),
        ("pip install -c constraints.txt -e .\ndecod demo", False),
        ("pip install decod-train", False),
        ("pip install ./decod/", False),
        ("decod leader run.toml", False),
    ],
)
def test_advice_to_install_a_strangers_package_is_known(text: str, is_advice: bool) -> None:
    assert bool(STRANGERS_PACKAGE.search(text)) == is_advice


def test_nothing_advises_to_install_decod_from_an_index() -> None:
    """Its name there is another project's. `pip uninstall decod` is good advice, though."""
    endings = {
        ".md",
        ".py",
        ".pyi",
        ".toml",
        ".txt",
        ".yaml",
        ".yml",
        ".sh",
        ".js",
        ".html",
        ".rst",
    }
    found = []
    for folder in (".", "decod", "docs", "docker", "scripts", "examples", "tests", ".github"):
        paths = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        for path in paths:
            here = path == Path(__file__).resolve()
            if here or not path.is_file() or not (path.suffix in endings or not path.suffix):
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"pip uninstall[^\n]*", "", text)
            found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in STRANGERS_PACKAGE.finditer(text)]
    assert not found


def test_the_package_has_the_name_that_its_code_looks_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION != "decod"
    assert list(project["scripts"]) == ["decod", DISTRIBUTION]


def test_links_to_files_in_the_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert not broken


def anchors_of(document: Path) -> set[str]:
    """Names by which links find a document's headings, as code forges make them."""
    text = document.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    shown = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in shown}


def test_links_to_sections_of_the_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
            goal = (document.parent / target) if target else document
            if goal.suffix == ".md" and anchor not in anchors_of(goal):
                broken.append(f"{document.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


def test_every_dependency_is_pinned() -> None:
    """An unpinned torch may pull in gigabytes of another build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=]", wanted)[0] for group in groups for wanted in group}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE))
    assert names - pinned == set()


def _describe(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    out = folder / "descriptors.bin"
    arguments = ["protoc", f"-I{ROOT / 'protos'}", "--include_source_info"]
    include = Path(protoc.__file__).parent / "_proto"
    arguments += [f"-I{include}", f"--descriptor_set_out={out}", *map(str, PROTOS)]
    assert protoc.main(arguments) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return list(files.file)


# Field numbers in descriptor.proto of what must have a comment, by kind of parent.
_FILE_PARTS = {4: "message", 5: "enum", 6: "service"}
_MESSAGE_PARTS = {2: "field", 3: "message", 4: "enum", 8: "oneof"}
_PARTS = {"message": _MESSAGE_PARTS, "enum": {2: "value"}, "service": {2: "method"}}


def _kind(path: list[int]) -> str | None:
    """What a location's path leads to, or None for a part that needs no comment."""
    parts, kind = _FILE_PARTS, None
    for number in path[::2]:
        kind = parts.get(number)
        if kind is None:
            return None
        parts = _PARTS.get(kind, {})
    return kind if len(path) % 2 == 0 else None


def test_everything_on_the_wire_has_a_comment(tmp_path: Path) -> None:
    bare = []
    for file in _describe(tmp_path):
        for location in file.source_code_info.location:
            kind = _kind(list(location.path))
            if kind and not (location.leading_comments or location.trailing_comments).strip():
                bare.append(f"{file.name}:{location.span[0] + 1} {kind}")
    assert not bare


def test_the_wire_package_is_versioned_and_in_its_folder(tmp_path: Path) -> None:
    assert {file.package for file in _describe(tmp_path)} == {"decod.wire.v1"}


def test_every_module_and_machine_of_the_core_says_what_it_is() -> None:
    """In its docstring. A reader finds there what it is for."""
    for file in core_files():
        tree = ast.parse((PROTOCOL / file).read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), file
    for file in machine_files():
        assert all(ast.get_docstring(machine) for machine in machines_of(file)), file


def test_architecture_names_every_part_of_the_core() -> None:
    """The folders and the files at the top, in the table of what each owns."""
    part = architecture().partition("\n## The core\n")[2].partition("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (.*?) \|", part, re.MULTILINE))
    named = set(re.findall(r"`([a-z_]+(?:/|\.py))`", cells))
    parts = {file.partition("/")[0] + ("/" if "/" in file else "") for file in core_files()}
    assert named == parts


def test_the_glossary_explains_each_word_once_and_in_order() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    part = glossary.partition("\n## Words\n")[2].partition("\n## ")[0]
    words = [word.lower() for word in re.findall(r"^\| (.+?) \| ", part, re.MULTILINE)][1:]
    assert len(words) == len(set(words))
    assert words == sorted(words)


def test_each_limit_names_code_and_a_test_that_exist() -> None:
    """In the tables of docs/security.md: what is not proven is no limit."""
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    part = page.partition("\n## Limits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+? \| `(\S+)` \| `(\S+)::(\w+)` \|$", part, re.MULTILINE)
    assert len(rows) > 30
    for what, code, file, test in rows:
        assert (ROOT / "decod" / code).is_file(), what
        assert _stands_in(file, test), f"{what}: {test}"


def test_each_attempt_to_get_in_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    part = page.partition("\n## Attempts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+? \| `(\S+)::(\w+)` \|$", part, re.MULTILINE)
    assert len(rows) > 10
    for what, file, test in rows:
        assert _stands_in(file, test), f"{what}: {test}"


def test_each_convention_names_a_test_that_exists_or_says_that_decod_lacks_it() -> None:
    page = (ROOT / "tests/tidy/conventions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .*?([^|]+) \| (\S+) \|$", page, re.MULTILINE)
    rows = [row for row in rows if row[0] != "convention"]
    assert len(rows) == len(re.findall(r"^\| (?!convention )", page, re.MULTILINE)) > 50
    for what, answer, proof in rows:
        if found := re.fullmatch(r"`(\S+)::(\w+)`", proof):
            assert _stands_in(found[1], found[2]), f"{what}: {proof}"
        else:
            assert proof == "none", what
        assert answer.strip().startswith("lacks ") == (proof == "none"), what


def _stands_in(file: str, test: str) -> bool:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    return re.search(rf"^((?:async )?def {test}\(|{test}: )", text, re.MULTILINE) is not None
