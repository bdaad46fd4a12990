"""A file system of fsspec in memory, which fails, delays, truncates and corrupts as it is told."""

import threading
from collections import Counter
from typing import Any, ClassVar

from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

PROTOCOL = "failing"


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types.
    """The class attributes say how parts of objects are read; `calm` resets them."""

    protocol = (PROTOCOL,)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[Exception | None] = None
    """Raised for every part."""
    may_answer: ClassVar[threading.Event] = threading.Event()
    """Parts are read once it is set."""
    corrupt: ClassVar[Counter[str]] = Counter()
    """File -> how many more of its parts have wrong bytes."""
    truncate: ClassVar[Counter[str]] = Counter()
    """File -> how many more of its parts are cut off."""
    asked: ClassVar[Counter[str]] = Counter()
    """Parts asked for, by file."""

    @classmethod
    def calm(cls) -> None:
        """Hold nothing, and fail no more."""
        cls.store.clear()
        cls.error = None
        cls.may_answer.set()
        for each in (cls.corrupt, cls.truncate, cls.asked):
            each.clear()

    @override
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        file = path.rpartition("/")[2]
        if not file.endswith(".bin"):
            content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
            return content
        self.asked[file] += 1
        assert self.may_answer.wait(30.0)
        if self.error is not None:
            raise self.error
        content = super().cat_file(path, start=start, end=end, **kwargs)
        if self.corrupt[file] > 0:
            self.corrupt[file] -= 1
            return bytes(len(content))
        if self.truncate[file] > 0:
            self.truncate[file] -= 1
            return content[:-1]
        return content


register_implementation(PROTOCOL, FailingFileSystem, clobber=True)
