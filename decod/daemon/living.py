"""What settings and pauses reach of a node, in one of its lives: the desk's `Settable`."""

from collections.abc import Sequence
from dataclasses import dataclass

from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import HostDevice
from decod.daemon.operator_requests import OperatorRequests
from decod.daemon.pausing.nvml import OwnGpu


@dataclass(frozen=True, slots=True)
class LivingNode:
    """The requests and the device of a node, for the desk."""

    requests: OperatorRequests
    device: HostDevice

    @property
    def pausable(self) -> bool:
        """Whether it is in the run, and stays."""
        return self.requests.pausable

    @property
    def paused(self) -> bool:
        """Whether it takes no microbatches, or none after this iteration."""
        return self.requests.paused

    @property
    def gpus(self) -> Sequence[OwnGpu]:
        """The GPUs that it uses."""
        return self.device.gpus

    async def pause(self, *, paused: bool) -> object:
        """Ask the leader for a pause, or for its end. Raises what `OperatorRequests.pause` does."""
        return await self.requests.pause(paused=paused)

    def use(self, config: NodeConfig) -> None:
        """Go by a configuration from now on, as far as a running node can."""
        self.device.use_threads(config.num_threads)
