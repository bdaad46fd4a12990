"""The arena against a model: what is handed out never overlaps, and what comes back is whole."""

import mmap
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from decod.driver.arena import ALIGNMENT_BYTES, ArenaAllocator, ArenaRegion
from tests.support.systems import linux_alone

SIZE_BYTES = 4 * mmap.PAGESIZE


class ArenaMachine(RuleBasedStateMachine):
    """Allocates and frees at random; every region keeps a pattern of its own."""

    regions = Bundle("regions")

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaAllocator(SIZE_BYTES)
        self.held: dict[int, tuple[ArenaRegion, int]] = {}
        self.num_made = 0

    @rule(target=regions, size_bytes=st.integers(0, SIZE_BYTES + 1))
    def allocate(self, size_bytes: int) -> ArenaRegion | None:
        region = self.arena.allocate(size_bytes)
        if region is None:
            assert max(self._gaps()) < self._taken(size_bytes)
            return None
        assert region.offset % ALIGNMENT_BYTES == 0
        assert len(region.view) == region.num_bytes == size_bytes
        self.num_made += 1
        region.view[:] = bytes([self.num_made % 256]) * size_bytes
        self.held[region.offset] = (region, self.num_made % 256)
        return region

    @rule(region=consumes(regions))
    def free(self, region: ArenaRegion | None) -> None:
        if region is not None:
            del self.held[region.offset]
            region.release()

    @invariant()
    def nothing_overlaps(self) -> None:
        for region, pattern in self.held.values():
            assert bytes(region.view) == bytes([pattern]) * region.num_bytes

    @invariant()
    def what_is_used_is_counted(self) -> None:
        taken = sum(self._taken(region.num_bytes) for region, _ in self.held.values())
        assert self.arena.used_bytes == taken

    @invariant()
    def free_stretches_are_joined(self) -> None:
        """Returned regions join their neighbours, or the arena would fall to pieces."""
        size_bytes = max(self._gaps())
        if size_bytes:
            region = self.arena.allocate(size_bytes)
            assert region is not None
            region.release()

    def _gaps(self) -> list[int]:
        """Sizes of the free stretches, worked out from what is held."""
        gaps, end = [0], 0
        for offset in sorted(self.held):
            gaps.append(offset - end)
            end = offset + self._taken(self.held[offset][0].num_bytes)
        return [*gaps, SIZE_BYTES - end]

    @staticmethod
    def _taken(size_bytes: int) -> int:
        return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

    def teardown(self) -> None:
        self.arena.close()


TestArena: Any = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_other_process_sees_what_is_written_at_the_offset_it_is_told() -> None:
    arena = ArenaAllocator(1)
    assert arena.size_bytes == mmap.PAGESIZE
    arena.allocate(10)
    region = arena.allocate(5)
    assert region is not None
    region.view[:] = b"hello"
    reference = region.reference()
    assert os.pread(arena.fd, reference["num_bytes"], reference["offset"]) == b"hello"
    arena.close()


@linux_alone
def test_a_closed_arena_holds_no_memory_though_somebody_holds_a_view() -> None:
    """A daemon has more than one life: what the last one held must not wait for its last view."""
    arena = ArenaAllocator(1 << 20)
    region = arena.allocate(1 << 20)
    assert region is not None
    region.view[:] = b"x" * region.num_bytes
    path = f"/proc/self/fd/{os.dup(arena.fd)}"
    assert os.stat(path).st_blocks
    arena.close()
    assert not os.stat(path).st_blocks
    assert region.view[0] == 0
    os.close(int(path.rpartition("/")[2]))
