"""Recognises files that are not what their names say: pointers, pages, and leavings of downloads.

Only the file's beginning is looked at, and nothing in it is opened or run.
"""

import re
from dataclasses import dataclass

BEGINNING_BYTES = 512
"""Enough to tell."""

_AGAIN = "fetch the file again"
_LFS = "run `git lfs pull` in its folder, or fetch the model with `hf download`"
_CONVERT = "convert the model to safetensors first, or choose a copy of it in that format"
_SIGN_IN = "sign in where the file comes from, accept the model's terms there, and fetch it again"

_POINTERS = (
    (b"version https://git-lfs.github.com/spec/", "Git LFS"),
    (b"version https://hawser.github.com/spec/", "Git LFS"),
    (b"# xet version", "Xet"),
)
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!--|(?:!doctype html|html|head|body)\b)", re.I)

_MAGIC = (
    (b"PK\x03\x04", "it is a zip archive, as torch.save writes pickled weights", _CONVERT),
    (b"\x80\x02", "it is pickled", _CONVERT),
    (b"\x80\x03", "it is pickled", _CONVERT),
    (b"\x80\x04", "it is pickled", _CONVERT),
    (b"\x80\x05", "it is pickled", _CONVERT),
    (b"GGUF", "it is in the format GGUF", _CONVERT),
    (b"\x89HDF\r\n", "it is in the format HDF5, which TensorFlow writes", _CONVERT),
    (b"\x1f\x8b", "it is packed with gzip", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "it is packed with zstd", "unpack it first"),
)

_ANSWERS = (
    b"access to model",
    b"entry not found",
    b"repository not found",
    b"invalid username or password",
    b"not found",
    b"unauthorized",
    b'{"error"',
)
"""Answers of servers in place of a file, in lower case."""


@dataclass(frozen=True, slots=True)
class Damage:
    """The true nature of such a file, and the remedy."""

    why: str
    fix: str


def pointer_of(beginning: bytes) -> str | None:
    """Return which program put a pointer in a file's place, if that shows."""
    return next((name for magic, name in _POINTERS if beginning.startswith(magic)), None)


def is_page(beginning: bytes) -> bool:
    """Return whether a file begins as a page of HTML does."""
    return _PAGE.match(beginning) is not None


def find_damage(beginning: bytes) -> Damage | None:
    """Return what a file with this beginning is instead of what its name says, if that shows."""
    if not beginning:
        return Damage("it is empty: its download did not begin, or the disk was full", _AGAIN)
    if (program := pointer_of(beginning)) is not None:
        return Damage(f"it is a pointer of {program}", _LFS)
    for magic, why, fix in _MAGIC:
        if beginning.startswith(magic):
            return Damage(why, fix)
    if not beginning.strip(b"\0"):
        why = "it begins with zeros only: room was reserved for it, and its download did not end"
        return Damage(why, _AGAIN)
    if is_page(beginning):
        return Damage("it is a page of HTML, maybe one that asks to sign in", _SIGN_IN)
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<?xml", b"<error")):
        return Damage("it is XML, probably a store's message about an error", _AGAIN)
    if text.startswith(_ANSWERS):
        shown = ascii(beginning.decode("ascii", "replace").strip().partition("\n")[0])[1:-1][:100]
        return Damage(f"it is a server's answer and not the file: {shown}", _SIGN_IN)
    return None


def is_cut_json(content: bytes) -> bool:
    """Return whether a file with a JSON object seems to end before that object does."""
    return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] != b"}"


_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_HUB_ADDRESS = re.compile(r"(https?:/+)?(www\.)?(huggingface\.co|hf\.co)/|hf:/+")


def is_hub_name(text: str) -> bool:
    """Return whether a text could be OWNER/NAME of a model on the Hugging Face Hub."""
    return "/" in text and _HUB_NAME.match(text) is not None


def hub_advice(path: str) -> str | None:
    """Return what to do if a path that is not there could be a model's name on the Hub.

    A few old models there have no owner, such as `gpt2`.
    """
    name = _HUB_ADDRESS.sub("", path.removesuffix("/tokenizer.json").rstrip("/"), count=1)
    if not _HUB_NAME.match(name):
        return None
    folder = name.rpartition("/")[2]
    return (
        f"if it is a model on the Hugging Face Hub, fetch it first: `hf download {name} "
        f"--local-dir {folder}`, and give {folder} instead"
    )
