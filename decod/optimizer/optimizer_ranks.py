"""Several processes of one host, as torch.distributed starts them: only the first has a node.

DDP gives all ranks the same gradients, and they take the same steps. Rank 0 alone adds gradients up
and talks to the node. After each step it tells the others what it does: step with these gradients,
move there, load that state. They do the same, so they hold the same bits.

Broadcasts are of plain numbers. Nothing is unpickled.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed
from torch import Tensor

from decod.errors import NotRunningError
from decod.optimizer.parameters import Parameters


class Order(IntEnum):
    """The orders that rank 0 gives the others."""

    GO_ON = 0
    """Nothing more happens between these two steps."""
    FAIL = 1
    """Rank 0 can't go on."""
    STEP = 2
    """Step with gradients that follow: a round has ended."""
    MOVE = 3
    """Take values of the parameters that follow: a round has ended."""
    END_ROUND = 4
    """A round has ended, and the parameters stay."""
    LOAD = 5
    """Load a state, whose path and description follow."""


class Ranks:
    """The processes of this host. Without torch.distributed it is one, and nothing is sent.

    Args:
        parameters: What is trained. Broadcasts are made on the device of the first.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._device = parameters.tensors[0].device
        self._is_one = (
            not torch.distributed.is_available()
            or not torch.distributed.is_initialized()
            or torch.distributed.get_world_size() == 1
        )

    @property
    def num(self) -> int:
        """Processes of this host."""
        return 1 if self._is_one else torch.distributed.get_world_size()

    @property
    def is_first(self) -> bool:
        """Return whether this process talks to the node."""
        return self._is_one or torch.distributed.get_rank() == 0

    # --- rank 0 -------------------------------------------------------------------------------

    def order(self, order: Order, round_number: int = 0) -> None:
        """Tell the others what to do."""
        if not self._is_one:
            self._broadcast(torch.tensor([order, round_number], dtype=torch.int64))

    def agree(self, flag: bool) -> bool:  # noqa: FBT001 - the only thing that is sent.
        """Return what rank 0 has said. Called by all ranks."""
        if self._is_one:
            return flag
        return bool(self._broadcast(torch.tensor([flag], dtype=torch.int64)).item())

    def step(self, gradients: Sequence[Tensor | None], round_number: int) -> None:
        """Tell the others to step with these gradients."""
        if self._is_one:
            return
        self.order(Order.STEP, round_number)
        self._broadcast(torch.tensor([gradient is not None for gradient in gradients]).byte())
        for gradient in gradients:
            if gradient is not None:
                self._broadcast(gradient)

    def move(self, round_number: int) -> None:
        """Tell the others to take over the parameters."""
        if self._is_one:
            return
        self.order(Order.MOVE, round_number)
        for parameter in self._parameters.tensors:
            self._broadcast(parameter.detach())

    def load(self, path: str, text: str, round_number: int) -> None:
        """Let the others load a state from a file of this host. Return when they have."""
        if self._is_one:
            return
        self.order(Order.LOAD, round_number)
        for each in (path, text):
            data = torch.frombuffer(bytearray(each.encode()), dtype=torch.uint8)
            self._broadcast(torch.tensor([data.numel()], dtype=torch.int64))
            self._broadcast(data)
        self.wait_for_all()

    # --- the others ---------------------------------------------------------------------------

    def next_order(self) -> tuple[Order, int]:
        """Return the next order of rank 0, and its round.

        Raises:
            NotRunningError: Rank 0 can't go on.
        """
        order, round_number = self._received(2, torch.int64).tolist()
        if order == Order.FAIL:
            raise NotRunningError(
                "rank 0 of this host can't go on",
                why="it alone talks to the node",
                fix="look at its error, and start the script again",
                code="E-RUN-043",
            )
        return Order(order), round_number

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients that follow an order to step."""
        flags = self._received(len(self._parameters.tensors), torch.uint8).tolist()
        found: list[Tensor | None] = []
        for flag, parameter in zip(flags, self._parameters.tensors, strict=True):
            found.append(self._broadcast(torch.empty_like(parameter.detach())) if flag else None)
        return found

    def values(self) -> list[Tensor]:
        """Return the values that follow an order to move."""
        return [
            self._broadcast(torch.empty_like(parameter.detach()))
            for parameter in self._parameters.tensors
        ]

    def texts(self) -> tuple[str, str]:
        """Return path and description that follow an order to load."""
        found = list[str]()
        for _ in range(2):
            (size,) = self._received(1, torch.int64).tolist()
            found.append(bytes(self._received(size, torch.uint8).tolist()).decode())
        return found[0], found[1]

    def wait_for_all(self) -> None:
        """Wait until every rank is here."""
        torch.distributed.barrier()

    def _received(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._broadcast(torch.empty(size, dtype=dtype)).cpu()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        on_device = tensor.to(self._device).contiguous()
        torch.distributed.broadcast(on_device, src=0)
        return on_device
