"""Preparation of a corpus: files of text become token shards, here or in an object store.

A corpus is built in a hidden folder inside its own, and moved into place when it is complete; the
index comes last. A preparation that fails therefore leaves an earlier corpus unchanged. A process
that is killed at the worst moment leaves a folder without an index, which does not count as a
corpus.

The work is cut into tasks (`decod.data.encoding`), which an engine runs (`decod.data.engine`). This
process only hands them out and keeps the journal. If it is killed, the same command goes on after
the last line of the journal.

The same files, in the same order, with the same options give the same bytes, wherever tasks run.

The corpus is one stream of tokens. Parts of the text fill it, and shards cut it at multiples of
their size. Where a part begins in the stream is known when all parts before it are done. A shard
can be joined when the parts that it lies in are done, and a part's file goes when all shards that
it lies in are.
"""

import bisect
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from decod.data.block import OnRead
from decod.data.chat import ChatConfig, TrainOn, load_chat
from decod.data.dataset import Dataset
from decod.data.encoding import (
    NUM_PLACES_MAX,
    PART_SIZE_BYTES,
    Part,
    PartResult,
    Preparation,
    PrepareJournal,
    Span,
    cut_file,
    encode,
    encode_part,
    group,
    has_journal,
    join_shard,
    release,
)
from decod.data.engine import Engine, EngineTask, run_tasks, this_process
from decod.data.index import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    INDEX_FILE,
    MARKS_FORMAT_VERSION,
    ConversationCounts,
    Index,
    Marks,
    ShardEntry,
    ShardWriter,
    Skipped,
    TokenizerEntry,
    dtype_for,
    require_few,
    write_index,
)
from decod.data.source_files import SourceFile, find_files, kind_by_name
from decod.data.sources import (
    BadRecord,
    Piece,
    Slice,
    foreign_kind,
    is_foreign,
    kind_of,
    lines_before,
    whole,
)
from decod.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from decod.errors import DataError, HardwareError
from decod.files import sync_folder, write_durably
from decod.objects import ObjectFolder, is_url, shown
from decod.paths import absolute_path
from decod.texts import counted


class Progression:
    """The tasks of one preparation, in the order in which they start.

    Args:
        preparation: What the tasks share.
        parts: The parts of the text.
        shard_tokens: Number of tokens of every shard but the last.
        journal: What is done already.
    """

    def __init__(
        self,
        preparation: Preparation,
        parts: Sequence[Part],
        shard_tokens: int,
        journal: PrepareJournal,
    ) -> None:
        self._preparation = preparation
        self._parts = parts
        self._shard_tokens = shard_tokens
        self._journal = journal
        self._ends: list[int] = []
        """Where the parts end in the stream, in tokens, as far as that is known."""
        self._num_parts_removed = 0
        self._num_shards_joined = 0
        """All shards below this are done."""
        self._next_shard = 0
        self._learn()
        self._waiting = (i for i in range(len(parts)) if not self._has_part(i))

    def run(self, engine: Engine, on_read: OnRead | None) -> tuple[ShardEntry, ...]:
        """Do what is left. Return all shards.

        Raises as `decod.data.engine.run_tasks`.
        """
        report = on_read or (lambda _num_bytes: None)
        for part_index in range(len(self._parts)):
            if self._has_part(part_index):
                report(self._size_of(part_index))
        direct = report if engine.in_process else None
        for (kind, index), result in run_tasks(engine, lambda: self._next_task(direct)):
            if kind == "part":
                self._journal.add_part(index, result)
                if direct is None:
                    report(self._size_of(index))
            else:
                self._journal.add_shard(index, result)
            self._learn()
        return tuple(self._journal.shards[i] for i in range(self._num_shards_joined))

    def left_out(self) -> tuple[int, list[BadRecord]]:
        """Return how many records were left out, and the first of them, in the corpus's order."""
        parts = [self._journal.parts[i] for i in range(len(self._parts))]
        first = itertools.chain.from_iterable(part.bad for part in parts)
        return sum(part.num_bad for part in parts), list(itertools.islice(first, NUM_PLACES_MAX))

    def _next_task(self, on_read: OnRead | None) -> EngineTask | None:
        # Shards first: they make room on the disk.
        while self._can_join(self._next_shard):
            shard_index = self._next_shard
            self._next_shard += 1
            if shard_index not in self._journal.shards:
                require_few(shard_index + 1)
                arguments = (self._preparation, shard_index, self._spans(shard_index))
                return EngineTask(("shard", shard_index), join_shard, arguments)
        part_index = next(self._waiting, None)
        if part_index is None:
            return None
        part = self._parts[part_index]
        return EngineTask(
            ("part", part_index), encode_part, (self._preparation, part_index, part, on_read)
        )

    def _can_join(self, shard_index: int) -> bool:
        known = self._ends[-1] if self._ends else 0
        if len(self._ends) == len(self._parts):
            return shard_index * self._shard_tokens < known
        return (shard_index + 1) * self._shard_tokens <= known

    def _spans(self, shard_index: int) -> tuple[Span, ...]:
        """Return where the tokens of a shard lie."""
        start = shard_index * self._shard_tokens
        end = min(start + self._shard_tokens, self._ends[-1])
        spans = []
        part_index = bisect.bisect_right(self._ends, start)
        while start < end:
            begin = self._ends[part_index - 1] if part_index else 0
            stop = min(end, self._ends[part_index])
            size = self._preparation.item_size_bytes
            spans.append(Span(part_index, (start - begin) * size, (stop - begin) * size))
            start = stop
            part_index = part_index + 1
        return tuple(span for span in spans if span.start < span.end)

    def _learn(self) -> None:
        """Take up what the journal says, and remove files that nobody needs any more."""
        parts = self._journal.parts
        while (part_index := len(self._ends)) in parts:
            begin = self._ends[-1] if self._ends else 0
            self._ends.append(begin + parts[part_index].num_tokens)
        while self._num_shards_joined in self._journal.shards:
            self._num_shards_joined += 1
        joined = self._num_shards_joined * self._shard_tokens
        while (
            self._num_parts_removed < len(self._ends)
            and self._ends[self._num_parts_removed] <= joined
        ):
            with suppress(FileNotFoundError):
                self._preparation.part_path(self._num_parts_removed).unlink()
            self._num_parts_removed += 1

    def _has_part(self, part_index: int) -> bool:
        return part_index in self._journal.parts

    def _size_of(self, part_index: int) -> int:
        return sum(each.size_bytes for each in self._parts[part_index])


def cut_files(
    files: Sequence[SourceFile], engine: Engine, *, skip_bad: bool = False
) -> Iterator[Slice]:
    """Yield the slices of all files, in order. The engine looks into large files.

    Raises as `decod.data.engine.run_tasks`.
    """
    large = ((i, file) for i, file in enumerate(files) if file.size_bytes > PART_SIZE_BYTES)

    def next_task() -> EngineTask | None:
        file_index, file = next(large, (0, None))
        cut = functools.partial(cut_file, skip_bad=skip_bad)
        return None if file is None else EngineTask(("file", file_index), cut, (file,))

    cut = dict(run_tasks(engine, next_task))
    for file_index, file in enumerate(files):
        yield from cut.get(("file", file_index), [whole(file)])


SHARD_TOKENS_DEFAULT = 2**26

_STAGING_FOLDER = ".preparing"
_OURS = re.compile(rf"^(shard-[0-9]{{5}}\.bin|{re.escape(TOKENIZER_FILE)})$")
# Increase it whenever tasks are cut otherwise, so that no earlier journal is taken up.
_PREPARATION_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Options for turning text into tokens."""

    tokenizer: str = "bytes"
    """`bytes`, the path of a `tokenizer.json`, or that of a folder with one."""
    eos: str | None = None
    """End-of-document token of a `tokenizer.json`. None: the stated one, or else a guess."""
    bos: str | None = None
    """Token before every document, or `none`. None: as transformers does it."""
    text_field: str = "text"
    """JSON field or Parquet column with the text."""
    shard_tokens: int = SHARD_TOKENS_DEFAULT
    """Largest number of tokens in a shard. The last shard holds the rest."""
    document_masks: bool = False
    """Mark where documents begin, so that no token is predicted from another document."""
    chat: bool = False
    """The files hold conversations, which the model's template makes texts."""
    sequence_length: int | None = None
    """Tokens of the windows into which conversations are packed."""
    train_on: TrainOn = "answers"
    """The tokens of conversations that are targets."""
    skip_bad: bool = False
    """Leave out records that hold no usable text, and count them."""
    force: bool = False
    """Replace the content of the output folder."""


def prepare(
    out: Path,
    names: Sequence[str | Path],
    config: PrepareConfig,
    *,
    engine: Engine | None = None,
    on_read: OnRead | None = None,
    on_tokenizer: Callable[[Tokenizer], object] = lambda _tokenizer: None,
) -> Index:
    """Write the text of some files as a corpus into the folder `out`, and return its index.

    If the same preparation was interrupted before, this goes on where it was.

    Args:
        out: The corpus's folder, created if missing. All workers must see it.
        names: Paths and URLs of files and folders; see `decod.data.sources` for the kinds.
        config: Options.
        engine: Where the work is done. None: in this process.
        on_read: Called with the number of bytes read.
        on_tokenizer: Called with the tokenizer before any text is read.

    Raises:
        DataError: A file or the tokenizer is unusable, `out` is taken, or there is no text.
        HardwareError: The disk is full, or a worker died.
    """
    _check_shard_tokens(config.shard_tokens)
    for name in names:
        # Unlike Path.resolve, realpath accepts circular links. Opening them gives the error.
        real = os.path.realpath(absolute_path(out))
        if not is_url(str(name)) and Path(real).is_relative_to(
            os.path.realpath(absolute_path(Path(name)))
        ):
            raise _refused(out, f"it lies in {name}, whose text is to be read", "choose another")
    files = find_files(names)
    _require_text(files, config)
    encoder, tokenizer_file = load_tokenizer(config.tokenizer, eos=config.eos, bos=config.bos)
    chat = None
    if config.chat:
        assert config.sequence_length is not None
        length, train_on = config.sequence_length, config.train_on
        chat = load_chat(config.tokenizer, encoder, sequence_length=length, train_on=train_on)
    on_tokenizer(encoder)
    engine = engine or this_process()
    preparation = Preparation(
        folder=absolute_path(out) / _STAGING_FOLDER / _preparation_id(files, encoder, config, chat),
        text_field=config.text_field,
        skip_bad=config.skip_bad,
        tokenizer_sha256=encoder.sha256,
        eos_id=encoder.eos_id,
        bos_id=encoder.bos_id,
        dtype=dtype_for(encoder.vocab_size, marked=config.document_masks or config.chat),
        document_masks=config.document_masks,
        chat=chat,
        release=release(),
    )
    if config.skip_bad:
        strict = _preparation_id(files, encoder, replace(config, skip_bad=False), chat)
        begun = _begun(out, preparation.folder, config, preparation.folder.with_name(strict))
    else:
        begun = _begun(out, preparation.folder, config)
    with _translated_errors(out), _locked(out), begun as journal:
        _write_tokenizer(preparation.folder, tokenizer_file)
        parts = list(group(cut_files(files, engine, skip_bad=config.skip_bad)))
        preparation = replace(preparation, last_part=len(parts) - 1)
        progression = Progression(preparation, parts, config.shard_tokens, journal)
        # Another process takes longer to start than a small corpus takes here.
        engine = engine if len(parts) > 1 else this_process()
        shards = progression.run(engine, on_read)
        skipped = _skipped(files, *progression.left_out())
        is_marked = config.document_masks or config.chat
        marks = _marks(config, list(journal.parts.values()), skipped) if is_marked else None
        index = _index_of(encoder, shards, skipped, marks)
        journal.begin_move()
        _move_into_place(preparation.folder, out, index)
        shutil.rmtree(preparation.folder.parent, ignore_errors=True)
    return index


def write_corpus(
    out: Path,
    pieces: Iterable[Piece],
    tokenizer: tuple[Tokenizer, bytes | None],
    config: PrepareConfig,
) -> Index:
    """Tokenize `pieces` into a corpus at `out`, in this process alone. Raises as `prepare`.

    Args:
        out: The corpus's folder, created if missing.
        pieces: The documents.
        tokenizer: Result of `load_tokenizer`.
        config: Only `shard_tokens` and `force` are used.
    """
    _check_shard_tokens(config.shard_tokens)
    with _translated_errors(out), _locked(out):
        staging = out / _STAGING_FOLDER
        _check_free(out, force=config.force)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            _write_tokenizer(staging, tokenizer[1])
            shards = _write_shards(staging, pieces, tokenizer[0], config.shard_tokens)
            index = _index_of(tokenizer[0], shards)
            _move_into_place(staging, out, index)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return index


def _preparation_id(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    config: PrepareConfig,
    chat: ChatConfig | None,
) -> str:
    """Return the name of a preparation, which changes with everything that changes its tasks."""
    digest = hashlib.sha256()
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    texts = (config.text_field, config.skip_bad, config.document_masks)
    template = None if chat is None else astuple(chat)
    options = (tokenizer.sha256, ends, texts, template, config.shard_tokens)
    for part in (_PREPARATION_VERSION, PART_SIZE_BYTES, release()), options, *map(astuple, files):
        # ASCII, because names of files need not be Unicode.
        digest.update(json.dumps(part).encode("ascii"))
    return digest.hexdigest()[:32]


@contextmanager
def _begun(
    out: Path, folder: Path, config: PrepareConfig, strict: Path | None = None
) -> Iterator[PrepareJournal]:
    """Lend the journal of a preparation, new or taken up.

    Args:
        out: The corpus's folder.
        folder: For the preparation's files alone.
        config: The preparation's options.
        strict: Folder of the same preparation without --skip-bad, which a bad record may have
            ended. What it has done holds here, too.
    """
    if strict is not None and not folder.exists() and has_journal(strict):
        strict.rename(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with PrepareJournal(folder) as journal:
        try:
            if not journal.moving:
                _check_free(out, force=config.force)
                _check_not_begun(out, folder, force=config.force)
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
            for cut_off in folder.glob(".*"):
                # A process of the killed command may be about to do the same.
                cut_off.unlink(missing_ok=True)
            yield journal
        except BaseException:
            if journal.empty:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):
                    folder.parent.rmdir()
            raise


def _write_shards(
    folder: Path, pieces: Iterable[Piece], encoder: Tokenizer, shard_tokens: int
) -> tuple[ShardEntry, ...]:
    writer = ShardWriter(folder, dtype=dtype_for(encoder.vocab_size), shard_tokens=shard_tokens)
    try:
        for token_ids in encode(pieces, encoder):
            writer.append(token_ids)
        return writer.finish()
    finally:
        writer.close()


def _write_tokenizer(folder: Path, content: bytes | None) -> None:
    if content is not None:
        write_durably(folder / TOKENIZER_FILE, content)


def _require_text(files: Sequence[SourceFile], config: PrepareConfig) -> None:
    """Refuse files that are no text, before hours are spent on the others.

    Files in a store are looked at when they are read: before, that would take a request for each.

    Raises:
        DataError: There are such files.
    """
    foreign = []
    for file in files:
        if config.chat and kind_of(file.name)[0] == "text":
            raise DataError(
                f"{file.name} holds no conversations",
                why="with --chat, names of files end in .jsonl, .ndjson, .json or .parquet",
                fix="leave it out: name the other files, rather than their folder",
                code="E-DAT-011",
            )
        # A bad file of text is a record, which may be skipped.
        if not config.skip_bad or kind_of(file.name)[0] != "text":
            kind = kind_by_name(file.name) if is_url(file.name) else foreign_kind(file)
            if kind is not None:
                foreign.append(is_foreign(file.name, kind))
    if not foreign:
        return
    first = foreign[0]
    if len(foreign) == 1:
        raise first
    others = counted(len(foreign) - 1, "more file")
    raise DataError(
        f"{first.what}, and {others} of {len(files)} are no text",
        why=first.why,
        fix=first.fix,
        code=first.code,
    )


def _skipped(
    files: Sequence[SourceFile], num_records: int, first: Sequence[BadRecord]
) -> Skipped | None:
    """Return what the index says of records that were left out."""
    if not num_records:
        return None
    by_name = {file.name: file for file in files}
    # Only now, because it reads all that stands before. The parts don't know their first line.
    before = {
        (each.file, each.begin): lines_before(by_name[each.file], each.begin) for each in first
    }
    places = []
    for each in first:
        number = before[each.file, each.begin] + each.number
        place = "" if each.unit == "file" else f"{each.file}, {each.unit} {number}: "
        places.append(shown(f"{place}{each.reason}"))
    return Skipped(num_records=num_records, first=tuple(places))


def _marks(
    config: PrepareConfig, parts: Sequence[PartResult], skipped: Skipped | None
) -> Marks | None:
    """Return what the index says of marks; None if there is nothing to say it of.

    Raises:
        DataError: None of the conversations can be used.
    """
    num_targets = sum(part.num_targets for part in parts)
    if not config.chat:
        return Marks(num_targets=num_targets) if num_targets else None
    counts = Counter[str]()
    for part in parts:
        assert part.conversations is not None
        counts.update(part.conversations.model_dump())
    found = ConversationCounts(**counts)
    if not num_targets:
        num_bad = 0 if skipped is None else skipped.num_records
        raise DataError(
            "the files hold no conversation to train on",
            why=f"{found.num_unanswered} have no answer, the first answer of {found.num_too_long} "
            f"does not fit into {config.sequence_length} tokens, and {num_bad} were skipped",
            fix="check the files, or raise --sequence-length",
            code="E-DAT-017",
        )
    return Marks(
        num_targets=num_targets, sequence_length=config.sequence_length, conversations=found
    )


def _index_of(
    encoder: Tokenizer,
    shards: tuple[ShardEntry, ...],
    skipped: Skipped | None = None,
    marks: Marks | None = None,
) -> Index:
    if not shards:
        why = "a corpus without tokens cannot be trained on"
        fix = "check the paths"
        if skipped is not None:
            why = f"all records were skipped ({skipped.num_records}): {skipped.first[0]}"
            fix = "check the paths and --text-field"
        raise DataError(
            "there is no text in the given files",
            why=why,
            fix=f"{fix}; empty files, blank lines and hidden files are left out",
            code="E-DAT-017",
        )
    return Index(
        format_version=FORMAT_VERSION if marks is None else MARKS_FORMAT_VERSION,
        tokenizer=TokenizerEntry(
            kind=encoder.kind,
            sha256=encoder.sha256,
            vocab_size=encoder.vocab_size,
            eos_id=encoder.eos_id,
            bos_id=encoder.bos_id,
        ),
        dtype=dtype_for(encoder.vocab_size, marked=marks is not None),
        skipped=skipped,
        marks=marks,
        num_tokens=sum(shard.num_tokens for shard in shards),
        block_bytes=BLOCK_BYTES,
        shards=shards,
    )


@contextmanager
def _translated_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise HardwareError(
                f"{out} cannot take the corpus",
                why=error.strerror or "the disk is full",
                fix="free some space and run the same command again: it goes on where it was",
                code="E-HW-020",
            ) from error
        reason = error.strerror or str(error)
        raise _refused(out, reason, "choose a folder you may write") from error


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep a second preparation out of the folder, which is created if missing."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise _refused(out, "another preparation is writing to it", "wait until it ends") from error
    try:
        yield
    finally:
        os.close(descriptor)


def _check_free(out: Path, *, force: bool) -> None:
    names = sorted(entry.name for entry in out.iterdir() if entry.name != _STAGING_FOLDER)
    if not names or force:
        return
    if INDEX_FILE in names:
        raise _refused(out, "it already holds a corpus", "pass --force to replace it")
    raise _refused(out, f"it holds other files ({names[0]})", "choose an empty one or pass --force")


def _check_not_begun(out: Path, folder: Path, *, force: bool) -> None:
    if force:
        return
    for other in folder.parent.iterdir():
        if other != folder and has_journal(other):
            raise _refused(
                out,
                "it holds an interrupted preparation of other files, or with other options",
                "repeat that command to go on with it, or pass --force to drop it",
            )


def _check_shard_tokens(shard_tokens: int) -> None:
    if not 1 <= shard_tokens <= 2**36:
        raise DataError(
            f"--shard-tokens is {shard_tokens}",
            why="a shard holds at least one token, and files of over 2**36 tokens are a slip",
            fix=f"leave it out to get {SHARD_TOKENS_DEFAULT}",
            code="E-DAT-016",
        )


def _move_into_place(staging: Path, out: Path, index: Index) -> None:
    # From here to the end the folder has no index: the old index must not describe new shards.
    (out / INDEX_FILE).unlink(missing_ok=True)
    sync_folder(out)
    names = {TOKENIZER_FILE, *(shard.file for shard in index.shards)}
    if index.tokenizer.kind == "bytes":
        names.discard(TOKENIZER_FILE)
    for name in names:
        # A move that was interrupted has moved some of them.
        if (staging / name).exists():
            (staging / name).replace(out / name)
    for entry in list(out.iterdir()):
        if _OURS.match(entry.name) and entry.name not in names:
            entry.unlink()
    sync_folder(out)
    write_index(out, index)


def _refused(out: Path, reason: str, fix: str) -> DataError:
    return DataError(f"{out} cannot take the corpus", why=reason, fix=fix, code="E-DAT-016")


def upload(folder: Path, url: str, on_read: OnRead | None = None) -> None:
    """Copy a corpus to an object store. The index comes last: then the copy is complete.

    Args:
        folder: A folder that `decod data prepare` wrote.
        url: The folder in the store.
        on_read: Called with the number of bytes copied.

    Raises:
        DataError: The folder holds no complete corpus.
        StoreError: The store refuses.
    """
    with Dataset.open(folder) as dataset:
        store = ObjectFolder(url)
        for shard in dataset.index.shards:
            store.write(folder / shard.file, shard.file)
            if on_read is not None:
                on_read(shard.num_bytes)
        if dataset.index.tokenizer.kind == TOKENIZER_FILE:
            store.write(folder / TOKENIZER_FILE, TOKENIZER_FILE)
        store.write(folder / INDEX_FILE, INDEX_FILE)
