"""Generates control.proto from the core's messages, and decod/wire/v1/ from protos/.

    python scripts/gen_protos.py            # writes
    python scripts/gen_protos.py --check    # compares, writes nothing

`control.proto` is written by hand up to its line `oneof body {`. All that follows is made of the
classes of `decod.protocol.core.messages`: fields from their annotations, comments from their
docstrings. The file is also the record of all numbers. A field keeps its number as long as its
message and it keep their names. A new one gets the next number that was never used, and the number
of one that is gone is reserved.

The generated files are committed, so that installing decod needs no compiler. Services have no
generated stubs: decod registers generic handlers with its own codec.
"""

import argparse
import ast
import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from decod.wire.message_schema import BODIES, Part, Struct, structs, values_prefix  # noqa: E402

PACKAGE = Path("decod/wire/v1")
PATTERNS = ("*_pb2.py", "*_pb2.pyi")
CONTROL = ROOT / "protos" / PACKAGE / "control.proto"
HEAD_END = "  oneof body {\n"
TYPES = {int: "int64", float: "double", str: "string", bytes: "bytes", bool: "bool"}
WIDTH = 100


# --- numbers ----------------------------------------------------------------------------------


@dataclass
class Numbers:
    """The numbers of one message's fields, of the bodies, or of an enum's values."""

    known: dict[str, int] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)

    def of(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each name. Those that are gone are reserved from now on."""
        self.reserved |= {number for name, number in self.known.items() if name not in names}
        highest = max([0, *self.reserved, *self.known.values()])
        found = {}
        for name in names:
            if name not in self.known:
                highest += 1
            found[name] = self.known.get(name, highest)
        return found


def read_numbers(proto: Path) -> dict[str, Numbers]:
    """Return the numbers of a .proto file, by the names of its messages and enums."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        compile_protos([proto], f"--descriptor_set_out={out}")
        (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    numbers = {}
    for message in file.message_type:
        reserved = {n for span in message.reserved_range for n in range(span.start, span.end)}
        numbers[message.name] = Numbers(
            {each.name: each.number for each in message.field}, reserved
        )
    for enum in file.enum_type:
        # Here the end of a range is part of it.
        reserved = {n for span in enum.reserved_range for n in range(span.start, span.end + 1)}
        numbers[enum.name] = Numbers({each.name: each.number for each in enum.value}, reserved)
    return numbers


# --- comments ---------------------------------------------------------------------------------


@cache
def docs_of(cls: type) -> Mapping[str, str]:
    """Return the docstrings of a class's fields or members. Those of its bases count too."""
    docs: dict[str, str] = {}
    for each in cls.__mro__[:-1]:
        if not each.__module__.startswith("decod."):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(node, ast.ClassDef)
        for before, after in zip(node.body, node.body[1:], strict=False):
            match before, after:
                case (
                    ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs.setdefault(name, " ".join(text.split()))
    return docs


def comment_of(cls: type, part: Part) -> str:
    """Return what a field is, and its limits."""
    said = docs_of(cls).get(part.name, "")
    if not said and (part.struct is not None or is_enum(part.of)):
        said = first_sentence(part.of)
    text = " ".join(filter(None, (said, limits_of(part))))
    if not text:
        sys.exit(f"{cls.__name__}.{part.name} needs a docstring")
    return text


def is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def first_sentence(cls: type) -> str:
    return re.split(r"(?<=\.) ", " ".join((cls.__doc__ or "").split()))[0]


def limits_of(part: Part) -> str:
    """Return what a field may hold, for people."""
    each = readable(part.allowed.text) if part.allowed is not None else ""
    if part.repeated:
        num = f"{part.num_min} to {part.num_max}" if part.num_min else f"at most {part.num_max}"
        if part.num_min == part.num_max:
            num = f"exactly {part.num_max}"
        if part.unique is not None:
            num += f", each {' and '.join(part.unique)} once".replace("each  once", "each once")
        each = f"{num}; {each}" if each else num
    first, space, more = each.partition(" ")
    return f"{first if ':' in first else first.capitalize()}{space}{more}." if each else ""


def readable(text: str) -> str:
    """Return a text whose large numbers are powers of two where they are."""

    def power(match: re.Match[str]) -> str:
        number = int(match[0])
        if number & (number - 1) == 0:
            return f"2^{number.bit_length() - 1}"
        return f"2^{number.bit_length()} - 1" if number & (number + 1) == 0 else match[0]

    return re.sub(r"\b\d{7,}\b", power, text)


def comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - len(indent) - 3, break_on_hyphens=False):
        yield f"{indent}// {line}"


# --- control.proto ----------------------------------------------------------------------------


def control_proto() -> str:
    """Return the text of control.proto."""
    head, marker, _ = CONTROL.read_text(encoding="utf-8").partition(HEAD_END)
    numbers = read_numbers(CONTROL)
    envelope = numbers["Envelope"]
    own = set(re.findall(r" (\w+) = \d+;", head.partition("message Envelope {")[2]))
    bodies = Numbers(
        {name: number for name, number in envelope.known.items() if name not in own},
        envelope.reserved,
    )
    lines = list[str]()
    for name, number in bodies.of(list(BODIES)).items():
        cls = BODIES[name].cls
        lines += comment(first_sentence(cls), "    ")
        lines.append(f"    {cls.__name__} {name} = {number};")
    lines += ["  }", *reserved_line(bodies), "}"]
    seen = set[type]()
    for struct in structs():
        lines += ["", *message(struct, numbers.get(struct.cls.__name__, Numbers()))]
        for part in struct.parts:
            if is_enum(part.of) and part.of not in seen:
                seen.add(part.of)
                lines += ["", *enum(part.of, numbers.get(part.of.__name__, Numbers()))]
    return head + marker + "\n".join(lines) + "\n"


def reserved_line(numbers: Numbers) -> Iterator[str]:
    if numbers.reserved:
        yield f"  reserved {', '.join(map(str, sorted(numbers.reserved)))};"


def message(struct: Struct, numbers: Numbers) -> Iterator[str]:
    cls = struct.cls
    yield from comment(" ".join((cls.__doc__ or "").split()), "")
    found = numbers.of([part.name for part in struct.parts])
    if not struct.parts:
        yield f"message {cls.__name__} {{}}"
        return
    yield f"message {cls.__name__} {{"
    yield from reserved_line(numbers)
    for part in struct.parts:
        yield from comment(comment_of(cls, part), "  ")
        label = "repeated " if part.repeated else ""
        if part.optional and part.struct is None:
            label = "optional "
        yield f"  {label}{TYPES.get(part.of) or part.of.__name__} {part.name} = {found[part.name]};"
    yield "}"


def enum(cls: type[Enum], numbers: Numbers) -> Iterator[str]:
    prefix, docs = values_prefix(cls.__name__), docs_of(cls)
    yield from comment(
        f"{' '.join((cls.__doc__ or '').split())} An unknown value is malformed.", ""
    )
    yield f"enum {cls.__name__} {{"
    names = {f"{prefix}UNSPECIFIED": "Never sent."}
    names |= {f"{prefix}{member.name}": docs.get(member.name, "") for member in cls}
    found = numbers.of(list(names))
    found[f"{prefix}UNSPECIFIED"] = 0
    yield from reserved_line(numbers)
    for name, text in names.items():
        if not text:
            sys.exit(f"{cls.__name__}: {name} needs a docstring")
        yield from comment(text, "  ")
        yield f"  {name} = {found[name]};"
    yield "}"


# --- decod/wire/v1 ----------------------------------------------------------------------------


def compile_protos(protos: Sequence[Path], *outputs: str) -> None:
    include = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{include}", *outputs, *map(str, protos)]
    if protoc.main(arguments) != 0:
        sys.exit("protoc refused the files above")


def generate(out: Path) -> None:
    """Write the modules of every .proto below `out`, as decod/wire/v1/<name>_pb2.py and .pyi."""
    protos = sorted((ROOT / "protos" / PACKAGE).glob("*.proto"))
    compile_protos(protos, f"--python_out={out}", f"--pyi_out={out}")


def read_generated(root: Path) -> dict[str, str]:
    """Return the text of every generated module below `root`, by file name."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for pattern in PATTERNS
        for path in (root / PACKAGE).glob(pattern)
    }


def check() -> int:
    """Compare the committed files with fresh ones, and name each that differs."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = read_generated(Path(folder))
    committed = read_generated(ROOT)
    stale = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    if CONTROL.read_text(encoding="utf-8") != control_proto():
        stale.insert(0, CONTROL.name)
    for name in stale:
        print(f"{name} is not what it is made from; run scripts/gen_protos.py")
    return int(bool(stale))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args().check:
        return check()
    CONTROL.write_text(control_proto(), encoding="utf-8")
    for name in read_generated(ROOT):
        (ROOT / PACKAGE / name).unlink()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
