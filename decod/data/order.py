"""The order of the tokens: a pure function of the corpus's size, the run and a microbatch's id.

No node hands positions out or keeps a list of them. Any node that knows the manifest can compute
the tokens of any microbatch, so another data node can take the place of a dead one.

The corpus is one row of tokens. Window `w` covers the tokens `[w * S, w * S + S + 1)`, where `S`
is the sequence length: S inputs and S targets. Neighbouring windows share one token, which is the
last target of one and the first input of the next. So every token but the very first is a target
in exactly one window, except the last `(num_tokens - 1) % S` tokens, which are in none.

The sequences of a run are numbered from 0 in this order: iteration, data node, microbatch, row::

    n = (((iteration - 1) * num_data_nodes + data_node_index) * num_microbatches + index)
        * microbatch_size + row
    epoch = n // num_windows
    window = EpochOrder(num_windows, ...)(n % num_windows)

An epoch visits every window exactly once. In a small corpus the order is one permutation of all
windows. In a large one, almost every sequence would then need another block of the data. A block is
many times as large as a sequence, and only a cache of the corpus's size would help. A large corpus
is therefore cut into chunks of neighbouring windows, of which some hundred are open at a time:

- A lane is a row of chunks from anywhere in the corpus. One chunk of each lane is open.
- A round takes one window from each lane. The order of the lanes is drawn for the round, and the
  order of the windows for the chunk.
- Each lane begins a little further inside its first chunk than the lane before, and comes to the
  beginning of that chunk last. So chunks are opened one by one, evenly over the epoch.

Source of the permutations: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA
2002), methods 2 and 3. This is shuffling, not secrecy: the key is public.
"""

import hashlib
from dataclasses import dataclass

from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig

# Luby and Rackoff need 4 rounds for a strong pseudorandom permutation; twice that is still only
# microseconds, and evens out small domains, whose halves have few bits.
_NUM_ROUNDS = 8

NUM_LANES = 512
"""Places in a large corpus from which the sequences come at a time."""
CHUNK_TOKENS = 2**19
"""Most tokens in a chunk. A chunk is read from several blocks of 2^16 or 2^17 tokens, so its ends,
which share a block with its neighbours, matter little."""


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudorandom bijection of `range(size)` onto itself, in constant memory.

    It is a balanced Feistel network over the smallest even number of bits that holds `size` values.
    Values outside that range are enciphered again ("cycle walking") until they fall inside, on
    average less than four times. Both steps are bijections.
    """

    size: int
    """Number of values, at least 1."""
    key: bytes
    """Name of the permutation; any bytes."""

    def __call__(self, position: int) -> int:
        """Return the image of `position`. Both are in `range(size)`."""
        assert 0 <= position < self.size, (position, self.size)
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        value = self._encipher(position, half_bits)
        # Terminates: the walk follows a cycle of the enciphering that contains `position`.
        while value >= self.size:
            value = self._encipher(value, half_bits)
        return value

    def _encipher(self, value: int, half_bits: int) -> int:
        """Return the image of `value` among all numbers of `2 * half_bits` bits."""
        mask = (1 << half_bits) - 1
        left = value >> half_bits
        right = value & mask
        for round_index in range(_NUM_ROUNDS):
            block = self.key + bytes((round_index,)) + right.to_bytes(16, "little")
            mixed = int.from_bytes(hashlib.sha256(block).digest()[:16], "little") & mask
            left, right = right, left ^ mixed
        return (left << half_bits) | right


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order in which an epoch visits the windows: a bijection of `range(num_windows)`."""

    num_windows: int
    """The windows of the corpus, at least 1."""
    seed: int
    """The run's seed."""
    epoch: int
    """Number of the epoch, from 0."""
    chunk_windows: int
    """Most windows in a chunk, at least 1."""
    num_lanes: int = NUM_LANES

    def __call__(self, position: int) -> int:
        """Return the window at `position`. Both are in `range(num_windows)`."""
        lane_chunks = -(-self.num_windows // (self.num_lanes * self.chunk_windows))
        if lane_chunks == 1:
            return self._permuted("sequence", self.num_windows, position)
        num_chunks = lane_chunks * self.num_lanes
        chunk_windows = self.num_windows // num_chunks
        num_in_chunks = num_chunks * chunk_windows
        if position >= num_in_chunks:
            # What does not divide, less than a window for each chunk, comes last.
            num_left = self.num_windows - num_in_chunks
            return num_in_chunks + self._permuted("rest", num_left, position - num_in_chunks)
        round_index, place = divmod(position, self.num_lanes)
        lane = self._permuted(f"round {round_index}", self.num_lanes, place)
        start = lane * chunk_windows // self.num_lanes
        opened, place = divmod((start + round_index) % (lane_chunks * chunk_windows), chunk_windows)
        chunk = self._permuted("chunk", num_chunks, opened * self.num_lanes + lane)
        return chunk * chunk_windows + self._permuted(f"chunk {chunk}", chunk_windows, place)

    def _permuted(self, what: str, size: int, position: int) -> int:
        key = hashlib.sha256(f"{what} order:{self.seed}:{self.epoch}".encode("ascii")).digest()
        return Permutation(size, key)(position)


def count_windows(num_tokens: int, *, sequence_length: int) -> int:
    """Return the number of windows in a corpus of `num_tokens`; 0 if it is too short for one."""
    return max(0, (num_tokens - 1) // sequence_length)


def sequence_number(mb: MicrobatchId, batch: BatchConfig) -> int:
    """Return the number of a microbatch's first row among all sequences of the run, from 0.

    Raises:
        ConfigError: The id has an iteration, data node or index that the batch does not have.
    """
    for name, value, first, last in (
        ("iteration", mb.iteration, 1, None),
        ("data_node_index", mb.data_node_index, 0, batch.num_data_nodes - 1),
        ("index", mb.index, 0, batch.num_microbatches - 1),
    ):
        if value < first or (last is not None and value > last):
            allowed = f"at least {first}" if last is None else f"from {first} to {last}"
            raise ConfigError(
                f"microbatch {mb} has {name} {value}",
                why=f"this run's batch has only those {allowed}",
                fix="compare batch.num_data_nodes and batch.num_microbatches in the run file",
                code="E-CFG-020",
            )
    slot = (mb.iteration - 1) * batch.num_data_nodes + mb.data_node_index
    return (slot * batch.num_microbatches + mb.index) * batch.microbatch_size


def microbatch_windows(
    mb: MicrobatchId, *, batch: BatchConfig, num_tokens: int, seed: int
) -> list[int]:
    """Return the window of every row of a microbatch, in row order.

    Args:
        mb: Id of the microbatch.
        batch: The run's batch.
        num_tokens: Length of the corpus.
        seed: The run's seed.

    Raises:
        ConfigError: The run has no such microbatch.
        DataError: The corpus is shorter than one window.
    """
    num_windows = count_windows(num_tokens, sequence_length=batch.sequence_length)
    if num_windows == 0:
        raise DataError(
            f"the corpus has {num_tokens} tokens but one sequence needs "
            f"{batch.sequence_length + 1}",
            why="there is nothing to train on",
            fix="prepare more text, or lower batch.sequence_length",
            code="E-DAT-024",
        )
    chunk_windows = max(1, CHUNK_TOKENS // batch.sequence_length)
    first = sequence_number(mb, batch)
    windows = []
    for n in range(first, first + batch.microbatch_size):
        epoch, position = divmod(n, num_windows)
        windows.append(EpochOrder(num_windows, seed, epoch, chunk_windows)(position))
    return windows
