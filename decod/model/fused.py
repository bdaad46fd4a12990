"""Elementwise work on CUDA in one pass over memory, where torch's compiler works.

Written as single operations, a norm or a gate reads and writes each tensor several times. On a GPU
that takes as long as a good part of the matrix products, which the compiler's kernels avoid. The
products themselves stay with cuBLAS. The compiler needs Triton and a C compiler, which many hosts
lack: there the operations run as written, and the log says so. So they do if others may write to
the folder from which torch loads what it has compiled.

On CPUs nothing is compiled, and the compiler is not even loaded: that takes a second and 40 MiB.
"""

import logging
import os
import stat
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger("decod.worker")

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ELEMENTS_MIN = 1 << 20
"""Smaller tensors take no longer than the launch of a kernel, and compiling takes seconds."""

_TRIAL_ELEMENTS = 1 << 10


def fused(function: _Function) -> _Function:
    """Compile a function for CUDA when it is first called with a large tensor there.

    Args:
        function: Its first argument is the tensor that decides. It synchronises with nothing.
    """

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Any:
        small = not first.is_cuda or first.numel() < _ELEMENTS_MIN
        if small or torch.compiler.is_compiling() or not compiles(first.device):
            return function(first, *others)
        return _compiled(function)(first, *others)

    return run  # type: ignore[return-value]


@cache
def compiles(device: torch.device) -> bool:
    """Return whether torch's compiler works for a device. The first call takes seconds."""
    trial = torch.arange(_TRIAL_ELEMENTS, device=device, dtype=torch.float32)
    try:
        return bool(torch.equal(_compiled(_doubled)(trial), 2 * trial))
    except (RuntimeError, ImportError, OSError, AttributeError) as error:
        why = str(error).strip().partition("\n")[0]
        logger.warning("compute.not_compiled %s: elementwise work runs unfused, slower", why)
        return False


def _doubled(values: Tensor) -> Tensor:
    return values + values


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    require_private(Path(cache_dir()))
    # Its caches hold pickles.
    config.force_disable_caches = True
    # These kernels are small. A pool of compiling processes would outlive a process that is killed.
    config.compile_threads = 1
    # A stage's shapes do not change, and kernels for one shape are the fastest.
    return torch.compile(function, dynamic=False)


def require_private(folder: Path) -> None:
    """Raise an OSError if others may write where compiled code is put, and loaded from."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}, where compiled code is put")
