"""Partitions: of a flat vector among the members of a roster, and of blocks among stages."""

import math
from collections.abc import Callable, Sequence


def part_sizes(num_elements: int, num_parts: int) -> list[int]:
    """Return the sizes of contiguous parts, in elements. They differ by at most 1, longer first.

    Args:
        num_elements: Length of the vector, at least 0.
        num_parts: At least 1. With more parts than elements, the last ones are empty.
    """
    assert num_elements >= 0, num_elements
    assert num_parts >= 1, num_parts
    size, num_longer = divmod(num_elements, num_parts)
    sizes = [size + (index < num_longer) for index in range(num_parts)]
    assert sum(sizes) == num_elements, "every element is in one part"
    return sizes


def dealt(num: int, num_shares: int, after: Callable[[int, int], float]) -> tuple[int, ...]:
    """Return the sizes of shares with which the largest cost is least. Each has one or more.

    No other sizes are better: a share costs no less with more, and each thing goes where it costs
    least.

    Args:
        num: Things to deal out, at least `num_shares`.
        num_shares: At least 1.
        after: Takes the number of a share, and its size. Returns its cost. inf: it has no room.

    Returns:
        Nothing if there is no room for all.
    """
    sizes = [1] * num_shares
    for _ in range(num - num_shares):
        costs = [after(index, size + 1) for index, size in enumerate(sizes)]
        best = min(range(num_shares), key=lambda index: (costs[index], index))
        if costs[best] == math.inf:
            return ()
        sizes[best] += 1
    return tuple(sizes)


SHARE_FULL = 16
"""The share of a member that is as fast as most."""


def owners_of(shares: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Return the owner of each part, by its position among the members.

    A member owns parts by its share. The owners take turns, so that all have something to do from
    the beginning on. Whoever has the same shares comes to the same owners.

    Args:
        shares: Of each member, from 0 to `SHARE_FULL`. At least one member.
        num_parts: At least 1.
    """
    assert shares, "a part needs an owner"
    assert num_parts >= 1, num_parts
    if not any(shares):
        shares = [1] * len(shares)
    total = sum(shares)
    claims = [0] * len(shares)
    owners = list[int]()
    for _ in range(num_parts):
        claims = [claim + share for claim, share in zip(claims, shares, strict=True)]
        # Of equals the earliest.
        owner = max(range(len(shares)), key=lambda index: (claims[index], -index))
        claims[owner] -= total
        owners.append(owner)
    return tuple(owners)
