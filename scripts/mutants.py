"""Changes the code in small ways, one at a time, and counts how many changes the tests notice.

    python scripts/mutants.py decod/protocol --sample 300 --tests tests/unit/protocol
    python scripts/mutants.py decod/protocol --sample 300 --out before.json \\
        --tests inner=tests/unit/protocol --tests whole=tests/sim
    python scripts/mutants.py --compare before.json after.json

A *mutant* is the code with one change: a comparison, a sign, a number, a condition, a call or a
return that is another or missing. It is *killed* if a test fails with it, or hangs. The sample
depends on the seed and on the code alone, so a second run tells whether other tests are as good. A
smaller sample is the beginning of a larger one.

Each group of tests (`NAME=PATH,PATH`) is run once, to learn which tests run which line. A mutant is
tried with the tests that run its line, the fastest first, in a process that is forked for it. The
result shows what a group kills that others don't: its first failing test, or with `--all` every
one. `--compare` lists mutants that only the first of two results has killed, and exits with 1 if
there are more of them than of the opposite kind.
"""

import argparse
import ast
import copy
import importlib
import importlib.machinery
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]

_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_PRELOADED = ("numpy", "torch", "hypothesis", "grpc", "cryptography", "pydantic")
"""What forked processes need not import again. Nothing of decod is among them."""

_CPU_MIN_S, _CPU_RATIO = 20, 5
"""A mutant's tests hang if they take longer than this, and than they usually do so many times."""

_WALL_RATIO = 20
"""As much longer than that may the clock on the wall say, on a busy machine."""

_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """What it is, on one line."""
        texts = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.file}:{self.line} {' -> '.join(texts)}"

    def applied(self, source: str) -> str:
        """Return the file's text with the change. Columns count bytes, as those of `ast` do."""
        lines = source.encode().splitlines(keepends=True)
        first, last = lines[self.line - 1], lines[self.end_line - 1]
        changed = first[: self.column] + self.after.encode() + last[self.end_column :]
        return b"".join([*lines[: self.line - 1], changed, *lines[self.end_line :]]).decode()


@dataclass(slots=True)
class Result:
    """What became of a mutant: which tests of each group have failed."""

    mutant: Mutant
    killed_by: dict[str, list[str]] = field(default_factory=dict)

    @property
    def killed(self) -> bool:
        """Whether any test has noticed it."""
        return any(self.killed_by.values())


def _changed(node: ast.AST) -> Iterator[ast.AST | str]:
    """Yield what may stand in the place of a part of a program."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _OPPOSITES:
            yield _with(node, ops=[_OPPOSITES[type(op)]()])
        case ast.BoolOp(op=op):
            yield _with(node, op=_OPPOSITES[type(op)]())
        case ast.BinOp(op=op) if type(op) in _OPPOSITES and not _is_text(node):
            yield _with(node, op=_OPPOSITES[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED:
            yield _with(node, func=ast.Name(_SWAPPED[name]))
        case ast.Return(value=ast.Name() | ast.BinOp() | ast.List(elts=[_, *_])):
            yield "return []"
        case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Delete():
            yield "pass"


def _with(node: ast.AST, **values: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def _is_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in parts
    )


def _left_out(tree: ast.Module) -> set[ast.AST]:
    """Return parts whose change says nothing: annotations, what is raised or asserted."""
    found = set[ast.AST]()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
                parts = [node.returns, *node.decorator_list, *(a.annotation for a in arguments)]
            case ast.ClassDef():
                parts = [*node.decorator_list, *node.bases]
            case ast.AnnAssign():
                parts = [node.annotation]
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                parts = [node]
        found.update(each for part in parts if part is not None for each in ast.walk(part))
    return found


def mutants_of(path: Path) -> list[Mutant]:
    """Return all changes of a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    left_out, found = _left_out(tree), list[Mutant]()
    for node in ast.walk(tree):
        if node in left_out or not isinstance(node, ast.expr | ast.stmt):
            continue
        for changed in _changed(node):
            before = ast.get_source_segment(source, node) or ""
            text = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
            end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            place = (node.lineno, node.col_offset, *end)
            found.append(Mutant(str(path.relative_to(ROOT)), *place, before, text))
    return found


@dataclass(slots=True)
class Group:
    """Tests that are tried together, what they take, and which of them run which line."""

    paths: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """By test. Tests that failed without any change are left out."""
    runs: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """By file and line. An empty name stands for the import."""

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run what is changed, the fastest first."""
        lines = range(mutant.line, mutant.end_line + 1)
        found = set().union(*(self.runs.get((mutant.file, line), set()) for line in lines))
        if found == {""}:
            # A constant, or a default: whoever runs anything of the file may depend on it.
            places = (tests for (file, _), tests in self.runs.items() if file == mutant.file)
            found = found.union(*places)
        return sorted(found & self.seconds.keys(), key=self.seconds.__getitem__)


class Watching:
    """A plugin of pytest that runs chosen tests only, and tells what becomes of them."""

    def __init__(self, say: Callable[..., None], tests: list[str] | None = None) -> None:
        self._say = say
        self._places = None if tests is None else {test: n for n, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in their order."""
        if self._places is not None:
            items[:] = [item for item in items if item.nodeid in self._places]
            items.sort(key=lambda item: self._places[item.nodeid] if self._places else 0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell which test begins: it is the one that hangs, if none follows."""
        self._say("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of failures, also of fixtures."""
        if report.failed:
            self._say("fails", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell of files that can't be imported."""
        if report.failed:
            self._say("fails", report.nodeid)


class Mapping:
    """A plugin of pytest that measures which lines each test runs, and how long it takes."""

    def __init__(self, cov: coverage.Coverage) -> None:
        self._cov = cov
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test in a context of its own."""
        self._cov.switch_context(item.nodeid)
        begin_s = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - begin_s
        self._cov.switch_context("")


def _pytest(paths: list[str], plugin: object, *options: str) -> None:
    usual = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
    allowed = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    pytest.main([*usual, *allowed, *options, *paths], plugins=[plugin])


def _forked(work: Callable[[Callable[..., None]], None], limit_s: float) -> tuple[list[str], str]:
    """Run something in a process of its own; return who failed, and who was running when it ended.

    The second is empty if the process has come to its end by itself.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        cpu_s = int(limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))

        def say(*words: str) -> None:
            os.write(writing, (json.dumps(words) + "\n").encode())

        try:
            work(say)
            say("ends", "")
        finally:
            os._exit(0)
    os.close(writing)
    failed, running = list[str](), "start"
    for line in _lines(reading, time.monotonic() + _WALL_RATIO * limit_s):
        what, name = json.loads(line)
        if what == "fails":
            failed.append(name)
        else:
            running = name
    os.close(reading)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return list(dict.fromkeys(failed)), running


def _lines(descriptor: int, end_s: float) -> Iterator[bytes]:
    left = b""
    while select.select([descriptor], [], [], max(end_s - time.monotonic(), 0.0))[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, left = (left + data).split(b"\n")
        yield from lines


def mapped(paths: list[str], folders: list[Path]) -> Group:
    """Run tests once, and learn which of them run which line."""
    group = Group(paths)
    with tempfile.TemporaryDirectory() as folder:
        data_path, seconds_path = Path(folder, "lines"), Path(folder, "seconds")

        def work(_: Callable[..., None]) -> None:
            sources = [str(ROOT / each) for each in folders]
            cov = coverage.Coverage(data_file=str(data_path), source=sources, config_file=False)
            cov.start()
            plugin = Mapping(cov)
            _pytest(paths, plugin)
            cov.stop()
            cov.save()
            seconds_path.write_text(json.dumps(plugin.seconds))

        _forked(work, 3600.0)
        group.seconds = json.loads(seconds_path.read_text())
        data = coverage.CoverageData(str(data_path))
        data.read()
        for file in data.measured_files():
            name = str(Path(file).relative_to(ROOT))
            for line, tests in data.contexts_by_lineno(file).items():
                group.runs[name, line] = {*tests}
    failing, _ = killers(None, group, list(group.seconds), every=True)
    for test in failing:
        group.seconds.pop(test, None)
    return group


def killers(
    mutant: Mutant | None, group: Group, tests: list[str], *, every: bool
) -> tuple[list[str], str]:
    """Return the tests that fail with a mutant, all or the first; and the one that hangs."""
    files = sorted({test.partition("::")[0] for test in tests})

    def work(say: Callable[..., None]) -> None:
        if mutant is not None:
            _install(mutant)
        _pytest(files, Watching(say, tests), *(() if every else ("-x",)))

    usual_s = sum(group.seconds[test] for test in tests)
    return _forked(work, _CPU_MIN_S + _CPU_RATIO * usual_s) if tests else ([], "")


def _install(mutant: Mutant) -> None:
    """Have a mutant imported in place of the file."""
    path = ROOT / mutant.file
    changed = compile(mutant.applied(path.read_text(encoding="utf-8")), path, "exec")
    usual = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        return changed if Path(self.path) == path else usual(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def tried(mutant: Mutant, groups: dict[str, Group], *, every: bool) -> Result:
    """Try each group of tests with a mutant."""
    result = Result(mutant)
    for name, group in groups.items():
        failed, hangs = killers(mutant, group, group.tests_of(mutant), every=every)
        result.killed_by[name] = [*failed, *([f"{hangs} hangs"] if hangs else [])]
    return result


def _compared(before: Path, after: Path) -> int:
    first, second = (
        {each["name"]: each for each in json.loads(path.read_text())} for path in (before, after)
    )
    both = first.keys() & second.keys()
    lost = [name for name in both if first[name]["killed"] and not second[name]["killed"]]
    won = [name for name in both if second[name]["killed"] and not first[name]["killed"]]
    for name in sorted(lost):
        print(f"only before: {first[name]['name']} ({first[name]['killed_by']})")
    print(f"{len(both)} mutants in both: {len(lost)} killed only before, {len(won)} only after")
    return int(len(lost) > len(won))


def _groups(texts: list[str], folders: list[Path]) -> dict[str, Group]:
    named = [text.partition("=") if "=" in text else ("tests", "=", text) for text in texts]
    return {name: mapped(paths.split(","), folders) for name, _, paths in named}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="whose code is changed")
    parser.add_argument("--sample", type=int, default=100, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--tests", action="append", default=[], metavar="[NAME=]PATH,PATH")
    parser.add_argument("--all", action="store_true", help="go on after the first failure")
    parser.add_argument("--out", type=Path, help="where all results go, as JSON")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        return _compared(*arguments.compare)
    if not arguments.folders or not arguments.tests:
        parser.error("give folders, and --tests")
    paths = (p for folder in arguments.folders for p in sorted((ROOT / folder).rglob("*.py")))
    known = [mutant for path in paths for mutant in mutants_of(path)]
    rng = random.Random(arguments.seed)  # noqa: S311 - a sample that can be drawn again.
    sample = rng.sample(known, len(known))[: arguments.sample]
    print(f"{len(sample)} of {len(known)} mutants", flush=True)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    groups = _groups(arguments.tests, arguments.folders)
    results = list[Result]()
    for mutant in sample:
        results.append(tried(mutant, groups, every=arguments.all))
        if not results[-1].killed:
            print(f"survives: {mutant.name}", flush=True)
    for name in groups:
        num = sum(bool(result.killed_by[name]) for result in results)
        print(f"{name}: kills {num} of {len(results)}")
    print(f"all: kill {sum(result.killed for result in results)} of {len(results)}")
    if arguments.out is not None:
        rows = [{**asdict(r), "name": r.mutant.name, "killed": r.killed} for r in results]
        arguments.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
