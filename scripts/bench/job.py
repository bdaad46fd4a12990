"""The job that all subjects do: one run file and one corpus, so the same tokens and weights.

The corpus is source text of Python's library. Its tokenizer is a byte-level BPE that is trained on
this text, with the model's vocabulary size. Both are made in under ten seconds, and are the same on
every machine with the same Python.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from decod.config.run_file import DataSource, load_run_file, render_run_file
from decod.data.corpus import library_files
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.ids import MicrobatchId
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.model.writing import ModelWriter
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.train.checkpoint.store import CheckpointConfig

Batch = list[npt.NDArray[np.int64]]
"""The microbatches of an iteration, each (B, T + 1) token ids."""

TEXT_SIZE_MAX_BYTES = 2 << 20
"""Size of the corpus: about 600,000 tokens, far more than a measurement reads."""

MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
)
BATCH = BatchConfig(sequence_length=256, microbatch_size=4, num_microbatches=8)
NUM_RELAY_STAGES = 2
"""Relay stages of decod. It also has stage 0, with embedding, norm and head."""
NUM_FIRST_BLOCKS = 2
"""Blocks that stage 0 runs too. With them, the three stages take about the same time, and share the
cores evenly."""
NUM_PIPELINE_STAGES = 3
"""Stages of torch's pipeline, so that both subjects have three computing processes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run file on disk, and its contents."""

    run_file: Path
    run: RunConfig
    corpus: Path

    @property
    def tokens_per_iteration(self) -> int:
        return self.run.batch.tokens_per_microbatch * self.run.batch.num_microbatches


def read_job(run_file: Path) -> Job:
    """Return the job of a run file that `write_job` has written."""
    loaded = load_run_file(run_file)
    return Job(run_file, loaded.run, Path(loaded.data.path))


def write_job(folder: Path, num_iterations: int, model: ModelConfig = MODEL) -> Job:
    """Prepare corpus and run file in `folder` and return the job.

    Args:
        folder: An existing folder.
        num_iterations: The number of iterations of the run.
        model: The model to train.
    """
    run = RunConfig(
        name="bench-throughput",
        num_iterations=num_iterations,
        model=model,
        stages=StagesConfig(num_relay_stages=NUM_RELAY_STAGES, num_first_blocks=NUM_FIRST_BLOCKS),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    return write_run(folder, run)


def write_run(folder: Path, run: RunConfig) -> Job:
    """Write the run file of a run in `folder`, and its corpus if there is none yet."""
    corpus = folder / "corpus"
    if not corpus.exists():
        _prepare_corpus(folder, corpus, run.model.vocab_size)
    run_file = folder / f"{run.name}-{run.num_iterations}.toml"
    # No checkpoints: only training may use the disk and the links.
    none = CheckpointConfig(every_iterations=0)
    text = render_run_file(run, DataSource(path=str(corpus)), none)
    run_file.write_text(text, encoding="utf-8")
    return read_job(run_file)


def write_base(folder: Path) -> Path:
    """Write `MODEL` with its first weights, and return its folder."""
    base = folder / "base"
    writer = ModelWriter(base, MODEL)
    for name, shape in model_shapes(MODEL).items():
        weight = initial_weight(MODEL, seed=0, name=name, shape=shape)
        writer.write(name, memoryview(weight.numpy().tobytes()))
    writer.finish()
    writer.close()
    return base


def read_batches(job: Job) -> Iterator[Batch]:
    """Yield the microbatches of each iteration, the same that the run's data node reads."""
    with Dataset.open(job.corpus) as dataset:
        for iteration in range(1, job.run.num_iterations + 1):
            yield [
                dataset.microbatch(MicrobatchId(iteration, 0, index), job.run.batch, job.run.seed)
                for index in range(job.run.batch.num_microbatches)
            ]


def _prepare_corpus(folder: Path, corpus: Path, vocab_size: int) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Path(sysconfig.get_path("stdlib"))
    files, num_bytes = [], 0
    for name in library_files(library):
        try:
            size_bytes = len((library / name).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if num_bytes + size_bytes > TEXT_SIZE_MAX_BYTES:
            break
        num_bytes += size_bytes
        files.append(library / name)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8") for file in files), trainer)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer.save(str(tokenizer_file))
    prepare(corpus, files, PrepareConfig(tokenizer=str(tokenizer_file)))
