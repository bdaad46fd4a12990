"""Groups of peers, so that nobody averages with all others at once.

Peers stand in rows of nearly equal length. First each row averages. Then each column does, of what
its rows have come to. A column has one peer of each row, so it comes to the average of all:

    row 0    a  b  c          row averages: A, B, C          columns: A+B+C in each
    row 1    d  e  f  g
    row 2    h  i  j

Peers of a longer row that stand in no column get a column's average from its members. Columns add
up in the same order, so all of them come to the same bits.

Source: Moshpit SGD (Ryabinin et al., 2021), a grid of two dimensions. Deviation: rows carry the
weights of their peers, and every column has all rows. So two rounds give the exact weighted average
whatever the number of peers. The coordinator shuffles who stands where.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from decod.ids import NodeId
from decod.planner.partition import part_sizes

GROUP_MAX = 16
"""Most peers that average in one group."""


def num_rows(num_peers: int) -> int:
    """Return in how many rows so many peers stand. 1: all average at once."""
    return 1 if num_peers <= GROUP_MAX else isqrt(num_peers)


@dataclass(frozen=True, slots=True)
class Groups:
    """Who averages with whom.

    Args:
        rows: All who contribute, row by row.
        listeners: Peers that only get the average.
    """

    rows: tuple[tuple[NodeId, ...], ...]
    listeners: tuple[NodeId, ...] = ()

    @classmethod
    def of(cls, roster: Sequence[NodeId], num: int, listeners: Sequence[NodeId]) -> "Groups":
        """Return groups in so many rows."""
        rows, begin = list[tuple[NodeId, ...]](), 0
        for size in part_sizes(len(roster), num):
            rows.append(tuple(roster[begin : begin + size]))
            begin += size
        return cls(tuple(rows), tuple(listeners))

    @property
    def num_columns(self) -> int:
        """Columns, if there is more than one row."""
        return min(map(len, self.rows))

    def row_of(self, node: NodeId) -> int | None:
        """Return in which row a peer stands. None: it only listens."""
        return next((k for k, row in enumerate(self.rows) if node in row), None)

    def column_of(self, node: NodeId) -> int:
        """Return which column's average a peer gets."""
        row = self.row_of(node)
        place = self.listeners.index(node) if row is None else self.rows[row].index(node)
        return place % self.num_columns

    def column(self, index: int) -> tuple[NodeId, ...]:
        """Return who averages in a column, row by row."""
        return tuple(row[index] for row in self.rows)

    def audience(self, index: int) -> tuple[NodeId, ...]:
        """Return who gets a column's average, and contributes nothing to it."""
        if len(self.rows) == 1:
            return self.listeners
        extra = [node for row in self.rows for node in row[self.num_columns :]]
        both = (*extra, *self.listeners)
        return tuple(node for node in both if self.column_of(node) == index)
