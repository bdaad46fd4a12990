"""One member of hivemind's averager, which averages the same tensors. It needs hivemind, not decod.

    PYTHON -m bench.averaging_hivemind --member 0 --members 2 --threads 1

PYTHON belongs to an environment with hivemind, torch and numpy. Members find each other before the
measured time, so that it holds the all-reduce alone.
"""

import argparse
import time

import hivemind
import psutil
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl

from bench.averaging import NUM_ELEMENTS, done, now_s, read_line, say, seed_of

_MATCHMAKING_S = 3.0
_TIMEOUT_S = 300.0


def tensor_of(member: int) -> torch.Tensor:
    """Return a member's tensor."""
    generator = torch.Generator().manual_seed(seed_of(member, NUM_ELEMENTS))
    return torch.randn(NUM_ELEMENTS, generator=generator)


def cpu_s() -> float:
    """Return the processor time of this process and of all that it has started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


class Member:
    """A member and the round that it is in.

    Args:
        member: Its index.
        num_members: All of them take part.
    """

    def __init__(self, member: int, num_members: int) -> None:
        self._member, self._num_members = member, num_members
        self._own = tensor_of(member)
        others = (tensor_of(each) for each in range(num_members))
        self._expected = sum(others, torch.zeros(())) / num_members
        self._dht: hivemind.DHT | None = None
        self._averager: DecentralizedAverager | None = None
        self._round: StepControl | None = None

    def listen(self) -> str:
        """Let the first member be found; return its port and id. Others have none."""
        if self._member:
            return "0"
        self._dht = hivemind.DHT(host_maddrs=["/ip4/0.0.0.0/tcp/0"], start=True)
        return str(self._dht.get_visible_maddrs()[0]).partition("/tcp/")[2]

    def join(self, first: str) -> None:
        """Join the others at the first member's address, and find a group with them."""
        if self._dht is None:
            host, _, rest = first.partition(":")
            self._dht = hivemind.DHT(
                host_maddrs=["/ip4/0.0.0.0/tcp/0"],
                initial_peers=[f"/ip4/{host}/tcp/{rest}"],
                start=True,
            )
        self._averager = DecentralizedAverager(
            [self._own.clone()],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._num_members,
            min_group_size=self._num_members,
            min_matchmaking_time=_MATCHMAKING_S,
            allreduce_timeout=_TIMEOUT_S,
        )
        self._meet()

    def _meet(self) -> None:
        """Find a group for the next round."""
        assert self._averager is not None
        with self._averager.get_tensors() as (tensor,):
            tensor.copy_(self._own)
        self._round = self._averager.step(require_trigger=True, wait=False, timeout=_TIMEOUT_S)
        while self._round.stage is not AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.05)

    def average(self) -> None:
        """Average once, and report it."""
        assert self._averager is not None
        assert self._round is not None
        used_s, start_s = cpu_s(), now_s()
        self._round.allow_allreduce()
        self._round.result(_TIMEOUT_S)
        end_s, used_s = now_s(), cpu_s() - used_s
        with self._averager.get_tensors() as (tensor,):
            error = float((tensor - self._expected).norm() / self._expected.norm())
        self._meet()
        done(start_s, end_s, used_s, error)


def main() -> None:
    """Run one member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--member", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    member = Member(options.member, options.members)
    say("LISTENS", member.listen())
    while words := read_line():
        if words[0] == "PEERS":
            member.join(words[1])
            say("READY")
        else:
            member.average()


if __name__ == "__main__":
    main()
