"""Removes secrets and names of people and hosts from texts.

    private keys, join strings, tokens          [private key], [join string], [token]
    IP addresses, host names                    host-1, host-2, ...
    the user's home folder, others' homes       ~, /home/user-2
    the user's name                             user-1

The same name has the same pseudonym in all texts of one report. Loopback and unspecified addresses
stay, since they name nobody. Ids of nodes, runs and tokens stay: they are public.

Where a text may be a name or a secret, it is removed. So a report says sometimes less than it
might, and never more.
"""

import ipaddress
import json
import re
from collections.abc import Iterable

from decod.net.join_string import BREAKS, DASHES, LENGTH_MAX

PRIVATE_KEY, JOIN_STRING, TOKEN = "[private key]", "[join string]", "[token]"

_END = r"-----END [A-Z ]*PRIVATE KEY-----"
# The second form is a key whose end was cut off, the other pattern one without its beginning.
_PEM = re.compile(
    rf"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.{{0,8192}}?{_END}|(?:[A-Za-z0-9+/=\s]|\\n)*)",
    re.DOTALL,
)
_PEM_REST = re.compile(rf"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]{{16,128}}(?:\\n|\s)+){{1,64}}{_END}")
# As JSON writes what can't be seen.
_ESCAPED = r"\\[nrt]|\\u[0-9a-f]{4}"
# Mails and chats break join strings, and write other dashes. At most a whole one is removed with
# what is in between, so that the sentence behind it stays.
_JOIN_STRING = re.compile(
    rf"decod1(?:(?:{_ESCAPED}|[{BREAKS}])*[a-z2-7{DASHES}-]){{1,{LENGTH_MAX}}}(?:@[^\s\"'\\<>]*)?",
    re.IGNORECASE,
)
# 160 bits in base32. Ids of nodes and runs, and public keys, have other lengths.
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=\\u[0-9a-f]{4}))"
    r"(?:[a-z2-7]{32}|[A-Z2-7]{32})(?![A-Za-z0-9])"
)
_HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]{2,8}_)?[A-Za-z0-9]{16,}")
"""A token of the Hugging Face Hub."""
_HOME = re.compile(r"(/home/|/Users/|/var/home/)([^/\s\"'\\:,;)\]}]+)")
_IPV4 = re.compile(r"(?<![\w.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w]|\.[0-9])")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f.]{0,15}){2,8}(?:%[\w.-]+)?(?!\w)")
# Patterns find whole words at once: a pattern of labels within labels would take quadratic time.
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_DOTTED = re.compile(rf"(?<![A-Za-z0-9._-]){_WORD}")
_WITH_PORT = re.compile(rf"(?<![A-Za-z0-9._-])({_WORD}):([0-9]{{2,5}})(?![\w.:])")
"""A host name before a port, or what looks like one."""
_IN_URL = re.compile(rf"(://|@)({_WORD})")
_ESCAPES = {"%5B": "[", "%5D": "]", "%3A": ":"}
"""In addresses as gRPC writes them."""

_PORT_DIGITS_MIN = 4
"""Of a port behind a name without dots: `cuda:10` and `line:12` are no hosts."""
_SOURCE_SUFFIXES = ("py", "cpp", "cc", "cu", "c", "h", "hpp", "cuh", "so", "pyx", "rs")
"""`socket.cpp:460` is a line of code, unless its number may be a port of decod."""
_LINE_MAX = 1024

_NOBODY_USERS = ("root", "decod", "nobody")
_NOBODY_HOSTS = ("localhost", "localhost.localdomain", "ip6-localhost")


class Redactor:
    """Redacts the texts of one report.

    Args:
        users: Names of the users whose node it is.
        home: Their home folder.
        hosts: Names of this host and of others that are known.
        secrets: Texts that must not be in the report: lines of private keys.
    """

    def __init__(
        self,
        *,
        users: Iterable[str],
        home: str,
        hosts: Iterable[str] = (),
        secrets: Iterable[str] = (),
    ) -> None:
        named = [user for user in users if user not in _NOBODY_USERS]
        self._users = {user: f"user-{number}" for number, user in enumerate(named, start=1)}
        """Pseudonyms of users, whose names are removed wherever they are."""
        self._owners = dict[str, str]()
        """Pseudonyms of the owners of other homes."""
        self._home = home.rstrip("/")
        self._secrets = sorted({each for each in secrets if len(each) >= 16}, key=len, reverse=True)
        self._hosts: dict[str, str] = {}
        """Pseudonyms, by address or by name in lower case."""
        self._known: set[tuple[str, ...]] = set()
        """Labels of host names."""
        for host in hosts:
            self.learn_host(host)

    def learn_host(self, name: str) -> None:
        """Remove a host's name, and those of other hosts of its domain, wherever they are."""
        name = name.strip().strip(".").lower()
        labels = name.split(".")
        if name in _NOBODY_HOSTS or not re.search("[a-z]", labels[-1]) or _is_ip(name):
            return
        self._known.add(tuple(labels))
        if len(labels) > 2:
            # Its domain, if that is more than `example` or `com`.
            self._known.add(tuple(labels[1:]))

    def learn(self, text: str) -> None:
        """Learn the host names in a text: what stands before a port or in a URL."""
        for match in _WITH_PORT.finditer(text):
            name, number = match[1], match[2]
            dotted, last = "." in name, name.rpartition(".")[2]
            if not dotted and len(number) < _PORT_DIGITS_MIN:
                continue
            if dotted and last in _SOURCE_SUFFIXES and int(number) < _LINE_MAX:
                continue
            self.learn_host(name)
        for match in _IN_URL.finditer(text):
            if match[1] == "://" or "." in match[2].strip("."):
                self.learn_host(match[2])

    def redact(self, text: str) -> str:
        """Return a text without what nobody else should see. Learn its hosts first."""
        text = _PEM_REST.sub(PRIVATE_KEY, _PEM.sub(PRIVATE_KEY, text))
        for secret in self._secrets:
            text = text.replace(secret, PRIVATE_KEY)
        text = _JOIN_STRING.sub(JOIN_STRING, text)
        text = _TOKEN.sub(TOKEN, _HUB_TOKEN.sub(TOKEN, text))
        text = self._without_homes(text)
        for escape, plain in _ESCAPES.items():
            text = text.replace(escape, plain)
        text = _IPV6.sub(lambda match: self._ip(match[0]), text)
        text = _IPV4.sub(lambda match: self._ip(match[0]), text)
        text = self._without_hosts(text)
        for user, pseudonym in self._users.items():
            text = _word_pattern(_spellings(user)).sub(pseudonym, text)
        return text

    def _without_hosts(self, text: str) -> str:
        if not self._known:
            return text
        lengths = {len(labels) for labels in self._known}

        def replaced(match: re.Match[str]) -> str:
            found = match[0].rstrip(".")
            labels = found.lower().split(".")
            parts = (
                tuple(labels[begin : begin + length])
                for length in lengths
                for begin in range(len(labels) - length + 1)
            )
            if any(part in self._known for part in parts):
                return self._host(found) + match[0][len(found) :]
            return match[0]

        text = _DOTTED.sub(replaced, text)
        # Names within longer words, as in `core_alices-box.txt`.
        names = [".".join(labels) for labels in self._known]
        every = {spelling for name in names for spelling in _spellings(name)}
        return _word_pattern(every).sub(lambda match: self._host(match[0]), text)

    def _without_homes(self, text: str) -> str:
        for home in _spellings(self._home):
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        return _HOME.sub(lambda match: match[1] + self._home_of(match[2]), text)

    def _home_of(self, user: str) -> str:
        for name, pseudonym in self._users.items():
            if user in _spellings(name):
                return pseudonym
        number = len(self._users) + len(self._owners) + 1
        return self._owners.setdefault(user, f"user-{number}")

    def _ip(self, found: str) -> str:
        text = found
        # A sentence may end behind it, or go on after a colon.
        while text.endswith((".", ":")) and not _is_ip(text):
            text = text[:-1]
        if not _is_ip(text):
            return found
        address = ipaddress.ip_address(text.partition("%")[0])
        if address.is_loopback or address.is_unspecified:
            return found
        return self._host(str(address)) + found[len(text) :]

    def _host(self, name: str) -> str:
        name = name.lower()
        return self._hosts.setdefault(name, f"host-{len(self._hosts) + 1}")


def _word_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of words that are no part of a longer row of letters and digits."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    one_of = "|".join(map(re.escape, longest_first))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{one_of})(?![A-Za-z0-9])", re.IGNORECASE)


def _spellings(text: str) -> tuple[str, ...]:
    """Return a text as it stands in files: plainly, and as JSON escapes it. None if it is empty."""
    return tuple(dict.fromkeys((text, json.dumps(text)[1:-1]))) if text else ()


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def lines_of_keys(text: str) -> list[str]:
    """Return the lines of the private keys in a text, which may be JSON."""
    found = _PEM.findall(text.replace("\\n", "\n"))
    return [line for key in found for line in key.splitlines() if "-----" not in line]
