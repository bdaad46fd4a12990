"""Connections of sites, which share their rates evenly among the tensors that they carry.

A tensor between two sites goes out by the one connection and in by the other. It travels at the
lower of its two shares. What a tensor does not use of a share is not given to others, so rates are
never too high. Rates settle a moment after tensors begin and end, because many do so together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decod.sim.kernel import Kernel

if TYPE_CHECKING:
    from decod.sim.network import Site

_SETTLE_S = 1e-3


@dataclass(eq=False, slots=True)
class _Line:
    """One direction of a site's connection."""

    rate_bytes_per_s: float
    loads: "dict[_Load, None]" = field(default_factory=dict)

    @property
    def share_bytes_per_s(self) -> float:
        return self.rate_bytes_per_s / len(self.loads)


@dataclass(eq=False, slots=True)
class _Load:
    """A tensor on its way."""

    lines: tuple[_Line, ...]
    left_bytes: float
    rate_max_bytes_per_s: float
    since_s: float
    """When `left_bytes` was true."""
    sent: Callable[[], None]
    late: Callable[[], None]
    rate_bytes_per_s: float = 0.0
    num_plans: int = 0
    """Grows with every change of the rate, which voids the end that was planned before."""
    ended: bool = False


class SharedLines:
    """Carries tensors between sites in virtual time.

    A sender that dies occupies its line until its tensors would have been sent.
    """

    def __init__(self, kernel: Kernel, sites: "Iterable[Site]") -> None:
        self._kernel = kernel
        self._lines: dict[str, tuple[_Line, _Line]] = {}
        """Up and down, by host."""
        for site in sites:
            lines = _Line(site.up_bytes_per_s), _Line(site.down_bytes_per_s)
            self._lines.update(dict.fromkeys(site.hosts, lines))
        self._changed: dict[_Line, None] = {}

    def between(self, sender: str, receiver: str) -> tuple[_Line, ...]:
        """Return the lines that a tensor takes. Empty: it uses no shared line."""
        here = self._lines.get(sender)
        there = self._lines.get(receiver)
        if here is there:
            return ()
        up = () if here is None else here[:1]
        down = () if there is None else there[1:]
        return (*up, *down)

    def carry(
        self,
        lines: tuple[_Line, ...],
        size_bytes: int,
        *,
        least_s: float,
        limit_s: float,
        sent: Callable[[], None],
        late: Callable[[], None],
    ) -> None:
        """Carry a tensor.

        Args:
            lines: That it takes.
            size_bytes: Its size.
            least_s: What it would take if it shared no line.
            limit_s: After which it is given up.
            sent: Called when its last byte has left.
            late: Called instead if it is given up.
        """
        load = _Load(lines, size_bytes, size_bytes / least_s, self._kernel.now_s, sent, late)
        for line in lines:
            line.loads[load] = None
        self._change(lines)
        self._kernel.after(limit_s, self._give_up, load)

    def _change(self, lines: tuple[_Line, ...]) -> None:
        if not self._changed:
            self._kernel.after(_SETTLE_S, self._settle)
        self._changed.update(dict.fromkeys(lines))

    def _settle(self) -> None:
        """Give every tensor on a line that has changed its new rate."""
        loads = dict.fromkeys(load for line in self._changed for load in line.loads)
        self._changed.clear()
        now_s = self._kernel.now_s
        for load in loads:
            shares = [line.share_bytes_per_s for line in load.lines]
            rate = min(load.rate_max_bytes_per_s, *shares)
            if rate != load.rate_bytes_per_s:
                load.left_bytes -= load.rate_bytes_per_s * (now_s - load.since_s)
                load.rate_bytes_per_s = rate
                load.since_s = now_s
                load.num_plans += 1
                left_s = max(load.left_bytes, 0.0) / rate
                self._kernel.after(left_s, self._through, load, load.num_plans)

    def _through(self, load: _Load, plan: int) -> None:
        if plan == load.num_plans and not load.ended:
            self._end(load)
            load.sent()

    def _give_up(self, load: _Load) -> None:
        if not load.ended:
            self._end(load)
            load.late()

    def _end(self, load: _Load) -> None:
        load.ended = True
        for line in load.lines:
            del line.loads[load]
        self._change(load.lines)
