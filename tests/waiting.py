"""Waiting for a condition without sleeping for a guessed time."""

import asyncio
from collections.abc import Callable


async def wait_until(predicate: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Returns once `predicate` is true; looks after every turn of the loop, and fails in time."""
    async with asyncio.timeout(timeout_s):
        while not predicate():
            # One turn of the loop per look; select's own wait keeps this from spinning.
            turn = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.002, turn.set_result, None)
            await turn
