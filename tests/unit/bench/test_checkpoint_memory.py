"""A model that is larger takes no more of the leader's memory, beside the leader's own stage."""

import sys
from pathlib import Path

import pytest
from safetensors import safe_open

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_checkpoint_memory as subject  # noqa: E402

_MIB = 1 << 20
_SMALL, _LARGE = ["--vocab", "512", "--layers", "5"], ["--vocab", "512", "--layers", "17"]
"""One block and four blocks a relay stage; the leader's own stage has one in both. A block's state
has 42 MiB."""

_PEAK_MAX_BYTES = 160 * _MIB
"""A few chunks of 4 MiB for each stage that arrives, the leader's own stage, and the allocator."""

_GROWTH_MAX_BYTES = 48 * _MIB
"""What chance does to the number of chunks in memory. The state grows by ten times as much."""


@pytest.mark.slow
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
    _check_model(tmp_path / "17")


def _check_model(folder: Path) -> None:
    """Compare the exported model with the members' states, which were on the disk."""
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as model:
        left = set(model.keys())
        for path in (folder / "given").glob("*.safetensors"):
            with safe_open(path, framework="pt") as state:
                for name in left & set(state.keys()):
                    left.discard(name)
                    same = model.get_tensor(name).view(dtype=_BITS) == state.get_tensor(name).view(
                        dtype=_BITS
                    )
                    assert bool(same.all()), name
    assert not left
