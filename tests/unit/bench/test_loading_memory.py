"""A node's stage is in memory once while it is loaded, wherever its state comes from."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_checkpoint_memory as family  # noqa: E402
import bench_loading_memory as subject  # noqa: E402

_MIB = 1 << 20
_ARGUMENTS = ["--layers", "8", "--relays", "1"]
"""A state of 343 MiB: it goes through a file."""

_BUFFERS_MAX_BYTES = 96 * _MIB
"""A few chunks of 4 MiB, and the allocator."""

_BUILT = {"a checkpoint", "a model folder"}
"""Ways in which a stage is built. Sums of gradients and weights to compute with are made, too."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_process_holds_a_state_twice(tmp_path: Path) -> None:
    run = family.run_of(family.parser().parse_args(_ARGUMENTS))
    # The parameters themselves, of 2 bytes, are only compared with the master weights.
    num_parameters = subject.stage_bytes(run) // 14
    found = subject.measure(_ARGUMENTS, run, tmp_path)
    assert len({each["hash"] for each in found.values()}) == 1, "the same bits from everywhere"
    for way, peaks in found.items():
        element_bytes = 12 + 2 + 4 if way in _BUILT else 12
        most_bytes = element_bytes * num_parameters + _BUFFERS_MAX_BYTES
        assert peaks["compute"] < most_bytes, (way, peaks, most_bytes)
        assert ("node" in peaks) is (way not in _BUILT)
        assert peaks.get("node", 0) < _BUFFERS_MAX_BYTES, (way, peaks)
