"""Generates decod/wire/v1/*_pb2.py and .pyi from protos/, or with --check compares them.

The generated files are committed, so that installing decod needs no compiler. Services have no
generated stubs: decod registers generic handlers with its own codec.
"""

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("decod/wire/v1")
PATTERNS = ("*_pb2.py", "*_pb2.pyi")


def generate(out: Path) -> None:
    """Write the modules of every .proto below `out`, as decod/wire/v1/<name>_pb2.py and .pyi."""
    protos = sorted(str(path) for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    if not protos:
        sys.exit(f"no .proto files in protos/{PACKAGE}")
    include = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{include}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc refused the files above")


def read_generated(root: Path) -> dict[str, str]:
    """Return the text of every generated module below `root`, by file name."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for pattern in PATTERNS
        for path in (root / PACKAGE).glob(pattern)
    }


def check() -> int:
    """Compare the committed modules with fresh ones, and name each that differs."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = read_generated(Path(folder))
    committed = read_generated(ROOT)
    stale = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    for name in stale:
        print(f"{PACKAGE / name} is not what protos/ gives; run scripts/gen_protos.py")
    return int(bool(stale))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args().check:
        return check()
    for name in read_generated(ROOT):
        (ROOT / PACKAGE / name).unlink()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
