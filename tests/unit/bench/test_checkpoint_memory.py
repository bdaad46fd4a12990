"""A model that is larger takes no more of the leader's memory, beside the leader's own stage."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_checkpoint_memory as subject  # noqa: E402

_MIB = 1 << 20
_SMALL, _LARGE = (["--vocab", "512", "--relays", "2", "--layers", n] for n in ("2", "8"))
"""One block and four blocks a relay stage. A block's state has 42 MiB. The leader's own stage holds
embedding and head, and has 7 MiB in both."""

_PEAK_MAX_BYTES = 128 * _MIB
"""A few chunks of 4 MiB for each stage that arrives, the leader's own stage, and the allocator."""

_GROWTH_MAX_BYTES = 32 * _MIB
"""What chance does to the number of chunks in memory. The state grows by 252 MiB."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_peak_of_every_process_does_not_grow_with_the_model(tmp_path: Path) -> None:
    found = []
    for arguments in (_SMALL, _LARGE):
        folder = tmp_path / arguments[-1]
        folder.mkdir()
        run = subject.run_of(subject.parser().parse_args(arguments))
        found.append(subject.measure(arguments, run, folder))
    small, large = found
    assert set(large) == {"donor", "checkpoint", "verify", "resume", "own stage", "export"}
    for phase, peak_bytes in large.items():
        assert peak_bytes < _PEAK_MAX_BYTES, (phase, peak_bytes)
        assert peak_bytes - small[phase] < _GROWTH_MAX_BYTES, (phase, peak_bytes, small[phase])
    _check_model(tmp_path / "8")


def _check_model(folder: Path) -> None:
    """Compare the exported model with the members' states, which were on the disk."""
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as model:
        left = set(model.keys())
        for path in (folder / "given").glob("*.safetensors"):
            with safe_open(path, framework="pt") as state:
                for name in left & set(state.keys()):
                    left.discard(name)
                    assert torch.equal(model.get_tensor(name), state.get_tensor(name)), name
    assert not left
