"""Tries every decoder that transformers knows: does a model in three stages give the same?

    python scripts/architectures.py                  a table of all, for docs/models.md
    python scripts/architectures.py mistral gemma2   of some

Each type gets a small model with random weights, in a process of its own. It works if three stages
have transformers' logits (1e-5, relative) and gradients (1e-4), and if an export has the bits of
the input. `CUT_TYPES` in `decod/run/model_layout.py` names the types that work. Exits with 1 if one
of these does not.
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

from decod.errors import DecodError  # noqa: E402
from decod.run import model_layout  # noqa: E402
from decod.run.model_layout import CUT_TYPES, installed_version  # noqa: E402
from tests.support.architectures import compared  # noqa: E402

LOGITS_MAX, GRADIENTS_MAX = 1e-5, 1e-4

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
        try:
            return asdict(compared(model_type, Path(scratch) / "model"))
        except DecodError as error:
            return {"why": f"{error.what.rpartition('model: ')[2]}: {error.why}"}
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is the answer.
            return {"why": f"no small model: {type(error).__name__}: {error}"}


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
        return {"why": "it takes too long"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"why": "it takes too much memory"}


def verdict(found: dict[str, object]) -> str:
    """Return an empty text for a type that works, else the reason."""
    if "why" in found:
        return " ".join(str(found["why"]).split())[:120]
    if float(str(found["logits"])) > LOGITS_MAX:
        return f"its logits differ by {found['logits']:.1e}"
    if float(str(found["gradients"])) > GRADIENTS_MAX:
        return f"its gradients differ by {found['gradients']:.1e}"
    return "" if found["bits"] else "its export has other bits"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--one", metavar="TYPE", help="compare in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_one(options.one)))
        return 0
    wrong = list[str]()
    works = list[str]()
    print(f"transformers {installed_version()}\n\n| type | works |\n|---|---|", flush=True)
    for model_type in options.types or all_types():
        why = verdict(tried(model_type))
        print(f"| `{model_type}` | {f'no: {why}' if why else 'yes'} |", flush=True)
        works += [] if why else [model_type]
        wrong += [model_type] if why and model_type in CUT_TYPES else []
    print(f"\n{len(works)} work: {', '.join(works)}")
    if wrong:
        print(f"These are in CUT_TYPES: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
