"""Rules about the code that no linter knows: budgets, dead modules, waiting."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from decod.exit_codes import ExitCode
from decod.journal.event_specs import EVENT_NAME, EVENTS
from decod.journal.step_metrics import STEP_METRIC_NAMES

ROOT = Path(__file__).resolve().parents[2]

# A change that needs more says why it is worth more for everybody to read.
PRODUCT_LINES_MAX = 126_500
PRODUCT_FILES_MAX = 458

# The only places that may look at the environment.
ENVIRONMENT_READERS = (
    "decod/cli/options.py",
    "decod/cli/printing.py",
    "decod/config/",
    "decod/daemon/",
    "decod/system.py",
    "decod/worker/",
)

# Modules that are started or looked up by name rather than imported.
ENTRY_POINTS = re.compile(
    # `instances` draws what tests and benchmarks route, `random_hosts` what they plan.
    r"decod\.(.*\.)?__main__|decod\.(lab\.)?cli\.[a-z_]+|decod\.wire\.v1\..*"
    r"|decod\.lab\.sim\.(instances|random_hosts)"
    # Training scripts import these.
    r"|decod\.optimizer\.(huggingface|lightning)"
)


def python_files(*folders: str) -> list[Path]:
    """Every file that people write; generated ones are left out."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith("_pb2.py")
    ]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Names that a file imports, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # "decod.worker" in a command line or an importlib call.
            yield from re.findall(r"\bdecod(?:\.\w+)+", node.value)


def product_files() -> list[Path]:
    """What a node consists of: research is read by those who do research."""
    return [path for path in python_files("decod") if ROOT / "decod/lab" not in path.parents]


def test_the_product_stays_within_its_budget() -> None:
    files = product_files()
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= PRODUCT_LINES_MAX
    assert len(files) <= PRODUCT_FILES_MAX


def test_a_file_name_belongs_to_one_file() -> None:
    names = Counter(path.name for path in product_files() if not path.name.startswith("__"))
    assert not [name for name, uses in names.items() if uses > 1]


# Words that mean something else elsewhere, and objects that are less than a run's setting.
OTHER_MEANINGS = {"method", "rank", "share", "inner", "compression", "name", "seed", "dtype"}
OTHER_HOMES = {"Averaging.quorum", "ExchangeConfig.wire_dtype", "RoundConfig.overlap"}


def fields_of(folder: str) -> Iterator[tuple[str, str]]:
    """Yield class and name of each annotated field below a folder."""
    for path in python_files(folder):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield node.name, field.target.id


def test_a_setting_of_a_run_has_one_home() -> None:
    """Whoever needs it takes the table of the run file, and does not copy its keys."""
    tables = ("SyncConfig", "ReductionConfig", "ServersConfig", "ProtocolConfig", "StagesConfig")
    keys = {key for table, key in fields_of("decod/run") if table in tables} - OTHER_MEANINGS
    rooms = ("protocol", "driver", "daemon", "worker", "train")
    copies = {
        f"{owner}.{key}"
        for room in rooms
        for owner, key in fields_of(f"decod/{room}")
        if key in keys
    }
    assert copies <= OTHER_HOMES


def test_a_step_metric_is_written_once() -> None:
    """Wherever people see it, it comes from the table; a module that names it is its source."""
    shown = python_files("decod/daemon", "decod/cli", "decod/insight")
    naming = [
        str(path.relative_to(ROOT))
        for path in shown
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and node.value in STEP_METRIC_NAMES
    ]
    assert not naming


def test_no_two_public_classes_share_a_name() -> None:
    """Each word means one thing."""
    homes = defaultdict[str, list[str]](list)
    for path in python_files("decod"):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(where(path, node))
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_tests_never_wait_for_time_to_pass() -> None:
    """A test that waits is slow or flaky; `asyncio.sleep(0)`, which only yields, is no waiting."""
    waiting = []
    for path in python_files("tests"):
        if path.name == "trickling.py":
            continue  # A program under test, whose fault is that it is slow.
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(func=ast.Attribute(attr="sleep"), args=[ast.Constant(value=0)]):
                    continue
                case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
                    waiting.append(where(path, node))
    assert not waiting


def test_only_configuration_reads_the_environment() -> None:
    found = []
    for path in python_files("decod"):
        if str(path.relative_to(ROOT)).startswith(ENVIRONMENT_READERS):
            continue
        found += [
            where(path, node)
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        ]
    assert not found


def test_only_devices_tell_kinds_of_devices_apart() -> None:
    found = []
    for path in python_files("decod"):
        if path == ROOT / "decod/devices.py":
            continue
        for node in ast.walk(parse(path)):
            match node:
                case ast.Attribute(
                    value=ast.Name(id="torch"),
                    attr="cuda" | "mps" | "xpu" | "version" | "backends",
                ):
                    found.append(where(path, node))
                case ast.Attribute(attr="is_cuda" | "is_mps" | "is_xpu"):
                    found.append(where(path, node))
    assert not found


LINUX_ALONE = re.compile(
    r"memfd_create|posix_fallocate|posix_fadvise|sched_getaffinity|adjtimex|mallopt|malloc_trim"
    r"|prctl|SO_PEERCRED|MADV_REMOVE|pidfd_open|eventfd|IP_MTU|/dev/shm|/proc(/self|/net)?\b"
    r"|unix-abstract"
)


def test_only_the_system_module_calls_what_linux_alone_has() -> None:
    """Texts count, too, unless they are documentation or words for people."""
    found = []
    for path in python_files("decod"):
        if path == ROOT / "decod/system.py":
            continue
        for node in ast.walk(parse(path)):
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and " " not in name and LINUX_ALONE.search(name):
                found.append(where(path, node))
    assert not found


def test_every_module_is_used_by_another_one() -> None:
    files = python_files("decod")
    used = {name for path in files for name in imported_modules(path) if name != module_name(path)}
    dead = [
        name
        for path in files
        if path.name != "__init__.py"
        and (name := module_name(path)) not in used
        and not ENTRY_POINTS.fullmatch(name)
    ]
    assert not dead


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files("decod", "scripts", "tests")
        if path.stat().st_size and not ast.get_docstring(parse(path))
    ]
    assert not silent


def test_every_event_that_is_noted_is_registered() -> None:
    """The core may not import the register, so only this holds the two together."""
    unknown = []
    for path in python_files("decod"):
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(
                    func=ast.Name(id="Note" | "noted")
                    | ast.Attribute(attr="Note")
                    | ast.Attribute(attr="note", value=ast.Attribute(attr="_out")),
                    args=[ast.Constant(value=str(name)), *_],
                ) if name not in EVENTS:
                    unknown.append(f"{where(path, node)} {name}")
    assert not unknown


@pytest.mark.parametrize("name", EVENTS)
def test_event_names_are_noun_and_participle(name: str) -> None:
    assert EVENT_NAME.match(name)


OUTSIDE = ("decod/daemon", "decod/driver", "decod/cli")


def _chain(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`; without `self`, and empty if it begins with something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return [name for name in reversed(names) if name != "self"]


def test_nobody_reaches_through_objects() -> None:
    """`node.driver.machine.context.view` knows the inside of four objects. Three names are enough:
    an object, a part of it that is public, and what that part says. Modules are no objects."""
    for path in python_files(*OUTSIDE):
        imported = {name.split(".")[0] for name in imported_modules(path)}
        long = [
            f"{where(path, node)} {'.'.join(names)}"
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Attribute)
            and len(names := _chain(node)) > 3
            and names[0] not in imported
        ]
        assert not long


def _assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned, or into whose value something is put.

    A slice writes into memory, which is nobody's attribute.
    """
    for node in ast.walk(tree):
        item = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice)
        target = node.value if isinstance(node, ast.Subscript) and item else node
        if isinstance(getattr(node, "ctx", None), ast.Store) and isinstance(target, ast.Attribute):
            yield target


def test_objects_are_complete_when_they_are_made() -> None:
    """Only an object's own methods assign its attributes, or put something into them."""
    for path in python_files("decod/daemon", "decod/driver"):
        found = [
            f"{where(path, target)} {ast.unparse(target)}"
            for target in _assigned(parse(path))
            if not (isinstance(target.value, ast.Name) and target.value.id == "self")
        ]
        assert not found


def test_only_the_commands_hold_the_whole_node() -> None:
    """Parts of a daemon take what they need, and not the node that is made of them."""
    holders = {
        path.stem
        for path in python_files("decod/daemon")
        if {"decod.daemon.node", "decod.daemon.pipeline_node"} & {*imported_modules(path)}
    }
    assert holders == {"leader_daemon", "life", "pipeline_node", "peer_node"}


def test_exit_codes_are_written_in_one_place() -> None:
    """Codes above 9 are unusual enough to be found as plain numbers."""
    codes = {int(code) for code in ExitCode if code > 9}
    found = [
        where(path, node)
        for path in python_files("decod")
        if path.parent.name != "sim"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in codes
        if path.name != "exit_codes.py"
    ]
    assert not found


def test_error_codes_have_one_form() -> None:
    odd = []
    for path in python_files("decod"):
        for node in ast.walk(parse(path)):
            match node:
                case ast.keyword(arg="code", value=ast.Constant(value=str(code))) if (
                    code.startswith("E-") and not re.fullmatch(r"E-[A-Z]{2,4}-[0-9]{3}", code)
                ):
                    odd.append(f"{where(path, node.value)} {code}")
    assert not odd
