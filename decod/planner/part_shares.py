"""Who reduces which part of an average, by how fast members send."""

from collections.abc import Sequence

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
