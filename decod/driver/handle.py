"""A node's core as the other parts of its daemon hold it, from before its start."""

from decod.driver.driver import NodeDriver
from decod.protocol.core.events import Event
from decod.protocol.facts import LeaderFacts, NodeFacts


class CoreHandle:
    """The core of one node. It starts late, since its device must be measured first."""

    def __init__(self) -> None:
        self._driver: NodeDriver | None = None

    def attach(self, driver: NodeDriver) -> None:
        """Stand for this driver's core from now on."""
        self._driver = driver

    @property
    def driver(self) -> NodeDriver:
        """The driver of a core that has started."""
        assert self._driver is not None
        return self._driver

    @property
    def started(self) -> bool:
        return self._driver is not None

    @property
    def runs(self) -> bool:
        """Whether the core has started, and has not stopped."""
        return self._driver is not None and not self._driver.stopped.done()

    @property
    def facts(self) -> NodeFacts | None:
        """What the core knows; None before it has started."""
        return self._driver.facts if self._driver is not None else None

    @property
    def leading(self) -> LeaderFacts | None:
        """What the core knows as the leader; None if it does not lead, or has not started."""
        return self._driver.facts.leading if self._driver is not None else None

    def post(self, event: Event) -> None:
        """Step the core with an event if it runs."""
        if self.runs:
            self.driver.post(event)
