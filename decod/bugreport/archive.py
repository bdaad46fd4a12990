"""Writes the archive of a bug report, whole or not at all."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from decod.bugreport.contents import ReportFile
from decod.durable import replace_durably
from decod.errors import HardwareError
from decod.texts import why_of

_FILE_MODE = 0o600


def write_archive(path: Path, files: Sequence[ReportFile], *, now_s: float) -> int:
    """Write a tar.gz that only its owner may read; return its size in bytes.

    Args:
        path: The file to write.
        files: What it holds, in a folder that has the archive's name.
        now_s: Seconds of the Unix epoch.

    Raises:
        HardwareError: It can't be written (E-HW-016). Nothing of it is left.
    """
    content = packed(files, folder=path.name.removesuffix(".tar.gz"), now_s=now_s)
    try:
        replace_durably(path, content, mode=_FILE_MODE)
    except OSError as error:
        raise HardwareError(
            f"can't write the bug report {path}",
            why=why_of(error),
            fix="free space, or name a file on another disk with --output",
            code="E-HW-016",
        ) from error
    return len(content)


def packed(files: Sequence[ReportFile], *, folder: str, now_s: float) -> bytes:
    """Return files as tar.gz. It names no user and no host."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for file in files:
            info = tarfile.TarInfo(f"{folder}/{file.name}")
            info.size, info.mtime, info.mode = len(file.content), int(now_s), _FILE_MODE
            archive.addfile(info, io.BytesIO(file.content))
    return stream.getvalue()
