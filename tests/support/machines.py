"""The core's machines, as docs/architecture.md lists them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "decod/protocol"


def machine_files(head: str = "machine") -> list[str]:
    """Return the files that a table of machines names, relative to `decod/protocol`.

    A name without a folder lies in the folder of the name before it.
    """
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    pattern = rf"^\| {head} \| file .*?(?=\n\n)"
    table = re.search(pattern, architecture, re.MULTILINE | re.DOTALL)
    assert table, "docs/architecture.md has no table of machines"
    found = []
    for row in table[0].splitlines()[2:]:
        folder = ""
        for name in re.findall(r"`([a-z_/]+\.py)`", row.split("|")[2]):
            if "/" in name:
                folder = f"{name.rpartition('/')[0]}/"
                found.append(name)
            else:
                found.append(f"{folder}{name}")
    return found


def machine_classes(file: str) -> list[str]:
    """Return the names of a file's machines: public classes whose methods return effects."""
    tree = ast.parse((PROTOCOL / file).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if not node.name.startswith("_") and _acts(node)]


def _acts(node: ast.ClassDef) -> bool:
    if any(ast.unparse(base) == "Protocol" for base in node.bases):
        return False
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return any(m.returns is not None and "Effect" in ast.unparse(m.returns) for m in methods)
