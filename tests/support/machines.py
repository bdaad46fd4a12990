"""The core's machines: classes whose methods return effects."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "decod/protocol"


def core_files() -> list[str]:
    """Return all modules of the core, relative to `decod/protocol`."""
    paths = [path for path in PROTOCOL.rglob("*.py") if path.stem != "__init__"]
    return sorted(str(path.relative_to(PROTOCOL)) for path in paths)


def machine_files() -> list[str]:
    """Return the modules that have a machine, relative to `decod/protocol`."""
    return [file for file in core_files() if machines_of(file)]


def machines_of(file: str) -> list[ast.ClassDef]:
    """Return a file's machines: public classes that want effects."""
    tree = ast.parse((PROTOCOL / file).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if not node.name.startswith("_") and _acts(node)]


def _acts(node: ast.ClassDef) -> bool:
    if any(ast.unparse(base) == "Protocol" for base in node.bases) or node.name == "EffectSink":
        return False
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    returns = [ast.unparse(m.returns) for m in methods if m.returns is not None]
    return "self._out." in ast.unparse(node) or any("Effect" in what for what in returns)
