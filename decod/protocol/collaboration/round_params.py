"""The numbers of a collaborative run, and of one peer in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """How a run goes from round to round."""

    target_batch_size: int
    """Samples of all peers together after which they average. At least 1."""
    num_phases: int = 1
    """Of an average: two if it travels as factors."""
    compresses: bool = False
    """The device keeps what coding leaves out, even if it contributes nothing."""
    share: int = 0
    """Samples after which this peer waits for the average. 0: it goes on as long as that is worth
    its while."""
    overlap: bool = False
    """This peer trains on while an average travels, and never waits."""
    heartbeat_max_s: float = 1.0
    """Longest time between two signs of life."""
    heartbeat_min_s: float = 0.1
    """Shortest time between two of them that tell no news."""
    heartbeat_busy_s: float = 0.2
    """Time between two signs of life while a round closes, and while an average is under way."""
    silence_max_s: float = 5.0
    """A peer that is silent for so long is lost."""
    seeking_max_s: float = 30.0
    """How long a newcomer looks for somebody who has the run's state, before it gives up."""
    closing_max_s: float = 2.0
    """How long a round waits for the contribution of a peer that lives."""
    averaging_timeout_s: float = 60.0
    """How long an average may take before it is tried without the peers that it waits for."""
    backlog_max: int = 8
    """Averages that are kept for a loop that does not apply them, or while a state is loaded. From
    half as many on, a coordinator has another peer take its place."""
    load_pause_s: float = 1.0
    """Between two attempts to load a state."""
    held_max_bytes: int = 1 << 62
    """A peer that holds more takes part in no further round until it has sent some of it: rounds
    are shorter than its averages travel."""
    loads_max: int = 3
    """States in a row that the loop can't use, after which the peer gives up."""
