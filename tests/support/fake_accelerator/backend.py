"""A device for torch that behaves like a GPU and computes on the CPU: see `backend.cpp`.

With `DECOD_TEST_DEVICE=fake:0` in the environment, torch loads it by itself, in the tests and in
every process that they start: it looks for backends of other makers among installed packages, and
`INSTALLED` looks like one. Tests that take a device then run on this one, too.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import types
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCE = HERE / "backend.cpp"


def load() -> None:
    """Build the backend, unless it is there, and register its devices with torch."""
    torch.utils.rename_privateuse1_backend("fake")
    torch.ops.load_library(str(_built()))
    torch._register_device_module("fake", _module())
    torch.ops.fake_accelerator.set_has_float64("DECOD_TEST_NO_FLOAT64" not in os.environ)


def _module() -> types.ModuleType:
    """Return what torch expects of `torch.fake`."""
    module = types.ModuleType("torch.fake")
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "get_device_name": lambda name: f"Fake 9000 at {name}",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda _: None,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _built() -> Path:
    """Return the library for this torch."""
    about = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    folder = ROOT / ".pytest_cache" / "fake_accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{hashlib.sha256(about).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            _compile(unfinished)
            unfinished.rename(library)
    return library


def _compile(target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
    options += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    options += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", str(SOURCE), "-o", str(target), *options], check=True)
