"""One member of `torch.distributed` over gloo, which sums the same tensors in place.

    python -m bench.averaging_gloo --member 0 --members 2 --rendezvous FILE --threads 1

`GLOO_SOCKET_IFNAME` in the environment names the interface.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from bench.averaging import NUM_ELEMENTS, done, now_s, own_cpu_s, read_line, say, seed_of


def tensor_of(member: int) -> torch.Tensor:
    """Return a member's tensor."""
    generator = torch.Generator().manual_seed(seed_of(member, NUM_ELEMENTS))
    return torch.randn(NUM_ELEMENTS, generator=generator)


def main() -> None:
    """Run one member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--member", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=options.member,
        world_size=options.members,
    )
    own = tensor_of(options.member)
    expected = sum((tensor_of(each) for each in range(options.members)), torch.zeros(()))
    say("LISTENS", 0)
    while words := read_line():
        if words[0] == "PEERS":
            say("READY")
            continue
        found = own.clone()
        cpu_s, start_s = own_cpu_s(), now_s()
        dist.all_reduce(found)
        end_s, cpu_s = now_s(), own_cpu_s() - cpu_s
        done(start_s, end_s, cpu_s, float((found - expected).norm() / expected.norm()))


if __name__ == "__main__":
    main()
