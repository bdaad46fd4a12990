"""Changes the code in small ways, one at a time, and counts how many changes the tests notice.

    python scripts/mutants.py decod/protocol --sample 300 --tests tests/unit/protocol
    python scripts/mutants.py decod/protocol --sample 300 --out before.json \\
        --tests inner=tests/unit/protocol --tests whole=tests/sim
    python scripts/mutants.py --compare before.json after.json

A *mutant* is the code with one change: a comparison, a sign, a number, a condition, a call or a
return that is another or missing. It is *killed* if a test fails with it, or hangs. The sample
depends on the seed and on the code alone, so a second run tells whether other tests are as good.

Each group of tests (`NAME=PATH,PATH`) is tried on each mutant, up to the first failure. So the
result shows what a group kills that others don't. `--compare` lists mutants that only the first of
two results has killed, and exits with 1 if there are more of them than of the opposite kind.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]

_COPIED = ("decod", "tests", "scripts", "docs", "protos", "examples", "pyproject.toml", "README.md")

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
_FAILED = ("FAILED ", "ERROR ")
"""How pytest's lines of failed tests begin."""

_GROUP_MAX_S = 900
"""How long a group of tests may take, when all of them pass."""

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
    """What became of a mutant: the first failing test of each group; empty if none failed."""

    mutant: Mutant
    killed_by: dict[str, str] = field(default_factory=dict)

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
        before = ast.get_source_segment(source, node) or ""
        for changed in _changed(node):
            text = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
            end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            place = (node.lineno, node.col_offset, *end)
            found.append(Mutant(str(path.relative_to(ROOT)), *place, before, text))
    return found


class Checkouts:
    """Copies of the source, in which mutants are tried at the same time."""

    def __init__(self, folder: Path, num: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for index in range(num):
            checkout = folder / str(index)
            for name in _COPIED:
                place = ROOT / name
                if place.is_dir():
                    shutil.copytree(place, checkout / name, ignore=shutil.ignore_patterns("*.pyc"))
                else:
                    checkout.mkdir(exist_ok=True)
                    shutil.copy(place, checkout / name)
            self._free.put(checkout)

    @contextmanager
    def one(self) -> Iterator[Path]:
        """Lend a copy."""
        checkout = self._free.get()
        try:
            yield checkout
        finally:
            self._free.put(checkout)


def tried(mutant: Mutant, groups: dict[str, list[str]], checkouts: Checkouts) -> Result:
    """Run each group of tests with a mutant."""
    result = Result(mutant)
    with checkouts.one() as checkout:
        path = checkout / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            for name, tests in groups.items():
                result.killed_by[name] = _first_failure(checkout, tests)
        finally:
            path.write_text(source, encoding="utf-8")
    return result


def _first_failure(checkout: Path, tests: list[str]) -> str:
    """Return the first test that fails, "timeout" if one hangs; empty if all pass."""
    options = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--timeout=60")
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            (sys.executable, "-m", "pytest", *options, *tests),
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GROUP_MAX_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0:
        return ""
    named = (line.split()[1] for line in done.stdout.splitlines() if line.startswith(_FAILED))
    return next(named, done.stdout[-200:] or f"exit code {done.returncode}")


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


def _groups(texts: list[str]) -> dict[str, list[str]]:
    named = [text.partition("=") if "=" in text else ("tests", "=", text) for text in texts]
    return {name: paths.split(",") for name, _, paths in named}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="whose code is changed")
    parser.add_argument("--sample", type=int, default=100, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--tests", action="append", default=[], metavar="[NAME=]PATH,PATH")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
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
    sample = rng.sample(known, min(arguments.sample, len(known)))
    groups = _groups(arguments.tests)
    print(f"{len(sample)} of {len(known)} mutants", flush=True)
    results = list[Result]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        checkouts = Checkouts(Path(folder), arguments.jobs)
        for result in pool.map(lambda mutant: tried(mutant, groups, checkouts), sample):
            results.append(result)
            if not result.killed:
                print(f"survives: {result.mutant.name}", flush=True)
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
