"""Tries every decoder that transformers knows: does a model in three stages give the same?

    python scripts/architectures.py                  the types that work, and why others do not
    python scripts/architectures.py mistral gemma2   of some

Each type gets a small model with random weights, in a process of its own. It works if three stages
have transformers' logits (1e-5, relative) and gradients (1e-4), and if an export has the bits of
the input. `CUT_TYPES` in `decod/run/model_layout.py` names the types that work, and
`TOGETHER_TYPES` those of them that can't read the documents of a sequence apart. Exits with 1 if
one of these names is wrong.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.errors import ConfigError  # noqa: E402
from decod.run import model_layout  # noqa: E402
from decod.run.model_layout import CUT_TYPES, TOGETHER_TYPES, installed_version  # noqa: E402
from tests.support.architectures import compared, saved_model  # noqa: E402

LOGITS_MAX, GRADIENTS_MAX = 1e-5, 1e-4
NO_SMALL_MODEL = "no small model of it was found, so it was not tried"

TIME_MAX_S = 180.0
MEMORY_MAX_BYTES = 12 << 30
"""Of a process. Some types have no small configuration."""


def all_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_one(model_type: str) -> dict[str, object]:
    """Compare one type in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    model_layout.CUT_TYPES |= {model_type}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        # Whatever transformers raises is the answer.
        try:
            whole = saved_model(model_type, folder)
        except Exception as error:  # noqa: BLE001
            return {"why": NO_SMALL_MODEL, "error": f"{type(error).__name__}: {error}"}
        try:
            return asdict(compared(whole, folder))
        except ConfigError as error:
            return {"why": error.why.partition(":")[0], "error": error.why}
        except AssertionError:
            return {"why": "it would train constants that its files hold"}
        except Exception as error:  # noqa: BLE001
            return {"why": "its stages do not run", "error": f"{type(error).__name__}: {error}"}


def tried(model_type: str) -> dict[str, object]:
    """Compare one type in another process."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", model_type],
            capture_output=True,
            text=True,
            timeout=TIME_MAX_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"why": NO_SMALL_MODEL, "error": "it takes too long"}
    lines = done.stdout.splitlines()
    if not lines:
        return {"why": NO_SMALL_MODEL, "error": "it takes too much memory"}
    found: dict[str, object] = json.loads(lines[-1])
    return found


def verdict(found: dict[str, object]) -> str:
    """Return an empty text for a type that works, else the reason."""
    if "why" in found:
        return str(found["why"])
    if float(str(found["logits"])) > LOGITS_MAX:
        return "its logits differ"
    if float(str(found["gradients"])) > GRADIENTS_MAX:
        return "its gradients differ"
    return "" if found["bits"] else "its export has other bits"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--one", metavar="TYPE", help="compare in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_one(options.one)))
        return 0
    reasons: dict[str, list[str]] = {}
    together: list[str] = []
    for model_type in options.types or all_types():
        found = tried(model_type)
        reasons.setdefault(verdict(found), []).append(model_type)
        if not verdict(found) and float(str(found["apart"])) > LOGITS_MAX:
            together.append(model_type)
        told = f"no: {verdict(found)} ({found.get('error', '')})" if verdict(found) else "yes"
        print(f"{model_type}: {' '.join(told.split())[:200]}", file=sys.stderr, flush=True)
    works = reasons.pop("", [])
    print(f"With transformers {installed_version()}, {len(works)} work: {', '.join(works)}.\n")
    print(f"These can't read documents apart: {', '.join(together)}.\n")
    print("| why not | types |\n|---|---|")
    for why, types in sorted(reasons.items(), key=lambda each: -len(each[1])):
        print(f"| {why} | {', '.join(types)} |")
    wrong = [each for types in reasons.values() for each in types if each in CUT_TYPES]
    misnamed = [each for each in works if (each in together) != (each in TOGETHER_TYPES)]
    if wrong or misnamed:
        print(f"Wrong in CUT_TYPES: {wrong}; in TOGETHER_TYPES: {misnamed}", file=sys.stderr)
    return 1 if wrong or misnamed else 0


if __name__ == "__main__":
    sys.exit(main())
