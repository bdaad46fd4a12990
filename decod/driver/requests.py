"""Open requests for copies of this node's state, which the machine answers later."""

import asyncio

from decod.driver.fetching import ServedState

STOPPED = "this node has stopped"


class Requests:
    """The open requests, by number."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, asyncio.Future[ServedState | str]] = {}

    def open(self) -> "tuple[int, asyncio.Future[ServedState | str]]":
        """Open a request; return its number and the future of its answer."""
        request_id, future = self._next, asyncio.get_running_loop().create_future()
        self._next += 1
        self._open[request_id] = future
        return request_id, future

    def answer(self, request_id: int, answer: ServedState | str) -> bool:
        """Answer a request; return False if its caller was cancelled."""
        future = self._open.pop(request_id)
        if future.cancelled():
            return False
        future.set_result(answer)
        return True

    def close(self) -> None:
        """Answer all open requests with the reason that this node has stopped."""
        for future in self._open.values():
            if not future.done():
                future.set_result(STOPPED)


async def taken(future: "asyncio.Future[ServedState | str]") -> ServedState | str:
    """Return a future's result. If the caller is cancelled, release a copy that comes later."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_release)
        raise


def _release(future: "asyncio.Future[ServedState | str]") -> None:
    if not future.cancelled() and future.exception() is None:
        state = future.result()
        if isinstance(state, ServedState):
            state.release()
