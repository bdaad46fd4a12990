"""The texts in `scenarios/` say what happens, line by line.

`pytest tests/unit/protocol/test_scenarios.py --rewrite` writes what happens now. Read the
difference before you commit it.
"""

import difflib
import re
from pathlib import Path

import pytest

from tests.support.machines import core_files, machine_files
from tests.unit.protocol.story import retell

FOLDER = Path(__file__).parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
INDEX = FOLDER / "README.md"
MARK = "<!-- index -->\n"
LINES_MAX = 62
UNTOLD = ("collaboration/", "core/known_views.py")
"""The core of collaborative runs has no texts. `known_views` serves all machines."""


def machines_of(text: str) -> list[str]:
    """Return the files behind `Machines:` in a text."""
    found = re.search(r"^Machines: (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found, "a text names its machines: 'Machines: leadership/joining.py, ...'"
    return re.split(r",\s+", found[1])


def index() -> str:
    """Return the table of all texts."""
    rows = ["| text | what happens | machines |", "|---|---|---|"]
    for path in SCENARIOS:
        text = path.read_text(encoding="utf-8")
        machines = ", ".join(f"`{name.removesuffix('.py')}`" for name in machines_of(text))
        rows.append(f"| [{path.stem}]({path.name}) | {text.splitlines()[0]} | {machines} |")
    return "\n".join(rows) + "\n"


def assert_equal(path: Path, wanted: str, found: str) -> None:
    """Fail with a readable difference if a file is not what it should be."""
    if wanted != found:
        lines = difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), "is written", "happens", lineterm="", n=2
        )
        shown = "\n".join(lines)
        pytest.fail(
            f"{path.name} does not say what happens now. If that was meant to change, write it anew"
            f" with --rewrite, and correct its prose.\n{shown}",
            pytrace=False,
        )


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_is_written_happens(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text(encoding="utf-8")
    told = retell(written)
    if request.config.getoption("--rewrite"):
        path.write_text(told, encoding="utf-8")
    else:
        assert_equal(path, told, written)


def test_the_index_lists_all_texts(request: pytest.FixtureRequest) -> None:
    written = INDEX.read_text(encoding="utf-8")
    wanted = written.partition(MARK)[0] + MARK + "\n" + index()
    if request.config.getoption("--rewrite"):
        INDEX.write_text(wanted, encoding="utf-8")
    else:
        assert_equal(INDEX, wanted, written)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_text_is_short_and_says_what_it_is_about(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES_MAX, "show less, or tell it in two texts"
    assert lines[0].endswith("."), "a text begins with one sentence"
    assert not lines[1], "an empty line follows the first sentence"
    assert len(lines[0]) <= 100


def test_every_machine_is_in_a_text() -> None:
    told = {name for path in SCENARIOS for name in machines_of(path.read_text(encoding="utf-8"))}
    assert not told - set(core_files()), "the core has no such modules"
    machines = {name for name in machine_files() if not name.startswith(UNTOLD)}
    assert not machines - told, "no text tells of these machines: write one in scenarios/"


def test_a_line_that_is_wrong_is_found() -> None:
    text = "> run d0 r1a\n> show Join\n> until Join\n     9.99  nonsense\n> wait 1\n"
    told = retell(text)
    assert "nonsense" not in told
    assert "0.00  r1a -> d0  Join role=relay capacity=2 stage_index=1" in told
    assert retell(told) == told
    with pytest.raises(pytest.fail.Exception, match="nonsense"):
        assert_equal(INDEX, told, text)
