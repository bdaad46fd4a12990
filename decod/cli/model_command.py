"""`decod export`, `push`, `generate` and `evaluate`: the model as a folder, a text and a number."""

import fcntl
import math
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from decod.cli.node_options import device_option, state_dir_option
from decod.cli.options import CORPUS
from decod.cli.printing import json_text, print_warning, use_color, waiting
from decod.config.node_config import check_device
from decod.errors import ConfigError, NotRunningError
from decod.model.sampling import Sampling
from decod.paths import full_path
from decod.texts import clean_text

_TIMEOUT_S = 3600.0
"""Long, since the weights of all stages travel to this host, maybe over slow links."""

_base_option = click.option(
    "--base",
    type=click.Path(file_okay=False),
    metavar="DIR|ORG/NAME",
    help="The model that an adapter changes, if it is not where the adapter says.",
)


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Write into a folder that holds files already.")
@click.option("--merge", is_flag=True, help="Write the whole model, with the adapter in it.")
@state_dir_option
def export(out: Path, state_dir: Path, *, force: bool, merge: bool) -> None:
    """Write the model into the folder OUT, in Hugging Face's format.

    \b
    Examples:
      decod export ./model
      decod export ./model --state-dir /tmp/leader

    Asks the leader, which runs on this host; all weights are those of one committed iteration, and
    training goes on. OUT gets config.json and model.safetensors, the tokenizer, and a model card.
    Of a run that trains an adapter, OUT gets what PEFT reads.
    """
    folder = full_path(out)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty",
            why="what is there could be replaced",
            fix="give another folder, or --force to write into this one",
            code="E-CFG-048",
        )
    answer = _export(state_dir, folder, merge=merge)
    iteration = clean_text(answer.get("iteration"))
    path = clean_text(str(folder), limit=4096)
    click.echo(f"iteration {iteration} is in {path}")
    base = None if merge else _base_in(answer)
    option = "" if base is None else f" --base {shlex.quote(str(base))}"
    click.echo(f'next: decod generate --model {shlex.quote(path)}{option} "Once upon a time"')
    if missing := answer.get("missing"):
        print_warning(f"the model there has {missing}")


@click.command()
@click.argument("name", metavar="ORG/NAME")
@click.option(
    "--from",
    "exported",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Upload this folder, which `decod export` has written, instead of the run's model.",
)
@_base_option
@click.option("--merge", is_flag=True, help="Upload the whole model, with the adapter in it.")
@click.option("--private", is_flag=True, help="Nobody else may see a repository that is made.")
@state_dir_option
def push(
    name: str,
    *,
    exported: Path | None,
    base: str | None,
    merge: bool,
    private: bool,
    state_dir: Path,
) -> None:
    """Upload the model to the Hugging Face Hub, as ORG/NAME.

    \b
    Examples:
      decod push someone/my-model
      decod push someone/my-model --private --state-dir /tmp/leader
      decod push someone/my-model --from ./model

    Exports as `decod export` does, at the leader, and uploads the result in one commit. The
    repository is made if it is missing. The token comes from HF_TOKEN or from `hf auth login`.
    """
    from decod.cli.hub import require_writable, upload
    from decod.cli.text_model import read_folder
    from decod.daemon.exporting import title_in_card
    from decod.model.adapter_folder import hub_base_of, is_adapter

    if exported is None and base is not None:
        raise click.UsageError("--base is for --from")
    if exported is not None and merge:
        raise click.UsageError("--merge and --from exclude each other")
    require_writable(name)
    with ExitStack() as stack:
        if exported is None:
            folder = stack.enter_context(_folder_in(state_dir))
            answer = _export(state_dir, folder, merge=merge)
            title = f"run {clean_text(answer.get('run'))}, iteration {answer.get('iteration')}"
            if missing := answer.get("missing"):
                print_warning(f"the model has {missing}")
        else:
            folder, base_dir = _model_and_base(str(full_path(exported)), base)
            read_folder(folder, base_dir)
            title = title_in_card(folder) or "a model of decod"
        if is_adapter(folder) and hub_base_of(folder) is None:
            print_warning(
                "the adapter names a folder of this host as its model, which others don't have:"
                " card.base_model in the run file gives it the name of one on the Hub"
            )
        address = upload(folder, name, f"Upload {title}", private=private)
    click.echo(f"{title} is at {address}")


def _export(state_dir: Path, folder: Path, *, merge: bool) -> dict[str, Any]:
    """Have the leader write its model into a folder; with `merge`, the whole of an adapted one."""
    if not merge:
        return _exported(state_dir, folder)
    with _folder_in(state_dir) as adapter:
        answer = _exported(state_dir, adapter)
        _merge(adapter, folder, _base_in(answer))
    return answer


def _exported(state_dir: Path, folder: Path) -> dict[str, Any]:
    """Have the leader write its model, or its adapter, into a folder. Return its answer."""
    from decod.daemon.control import ask

    with waiting("the leader puts the model together"):
        return ask(state_dir, {"command": "export", "path": str(folder)}, timeout_s=_TIMEOUT_S)


def _base_in(answer: Mapping[str, Any]) -> Path | None:
    """Return the folder of the model that the leader's run adapts."""
    base = answer.get("base")
    return Path(base) if isinstance(base, str) else None


def _merge(adapter: Path, out: Path, base: Path | None) -> None:
    """Write a model with an adapter in it, and what else lies beside the adapter."""
    from decod.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE, base_of

    base = base_of(adapter, base)
    if base is None:
        raise ConfigError(
            "--merge is given, and the run trains all parameters",
            why="there is no adapter to be merged",
            fix="leave out --merge",
            code="E-CFG-111",
        )
    from decod.model.hf_folder import write_merged

    with waiting("the adapter is merged into its model"):
        write_merged(adapter, base, out)
    for path in adapter.iterdir():
        if path.name not in (ADAPTER_CONFIG, ADAPTER_FILE):
            shutil.copyfile(path, out / path.name)


if TYPE_CHECKING:
    from decod.cli.text_model import TextModel

_EXPORT_TIMEOUT_S = 3600.0
"""The time that `decod export` may take, too."""

_STDIN_MAX_BYTES = 1 << 24
_NUM_TOKENS_MAX = 1_000_000
_VOCAB_SIZE_MAX = 1 << 24

_NICENESS = 10
"""The niceness of the process if a run trains on this host, so that the run is served first."""

_LOADING = "loading torch and the model"

_FOLDER_PREFIX = ".decod-generate-"
"""The beginning of the names of folders in the state folder that hold a model for as long as it is
read. Those that are left are removed, so nothing else may have such a name."""


class _Number(click.FloatRange):
    """A number in a range. `nan` is in none, which click does not see."""

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--model",
    type=click.Path(),
    metavar="DIR|ORG/NAME",
    help="A model that `decod export` has written, or one on the Hugging Face Hub. Without it, the"
    " model of the run that this host leads.",
)
@_base_option
@click.option(
    "--interactive", is_flag=True, help="Read prompts line by line, until Ctrl-D or the input ends."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, _NUM_TOKENS_MAX),
    default=200,
    show_default=True,
    metavar="N",
    help="Most tokens to generate for a prompt.",
)
@click.option(
    "--temperature",
    type=_Number(0, 100),
    default=0.8,
    show_default=True,
    metavar="T",
    help="0 takes the likeliest token each time; more gives more variety.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0, _VOCAB_SIZE_MAX),
    default=0,
    show_default=True,
    metavar="K",
    help="Choose among the K likeliest tokens; 0: among all.",
)
@click.option(
    "--top-p",
    type=_Number(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    metavar="P",
    help="Choose among the likeliest tokens that have probability P together.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="The same seed gives the same text; a new one each time if left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
@device_option
@state_dir_option
def generate(
    prompt: str | None,
    *,
    model: str | None,
    base: str | None,
    interactive: bool,
    device: str,
    state_dir: Path,
    **options: Any,
) -> int:
    """Continue the text PROMPT with a model, or the text on standard input if PROMPT is -.

    \b
    Examples:
      decod generate "Once upon a time"
      decod generate --model ./model --temperature 0 "Once upon a time"
      decod generate --model ./model - < beginning.txt
      decod generate --interactive

    Without --model it asks the leader on this host for the model of the last iteration, while
    training goes on. The generated text goes to standard output, all else to standard error.
    """
    check_device(device)
    if interactive == (prompt is not None):
        raise click.UsageError("give a PROMPT, - for standard input, or --interactive")
    num_tokens = options.pop("max_tokens")
    seed, as_json = options.pop("seed"), options.pop("as_json")
    sampling = Sampling(seed=secrets.randbits(32) if seed is None else seed, **options)
    # Read before the model is loaded, so that a mistake shows at once.
    text = None if prompt is None else _text_of(prompt)
    if model is None:
        found = _leaders_model(state_dir, device)
    else:
        found = _given_model(model, device, base)
    if text is not None:
        _continue(found, text, sampling, num_tokens, echo=sys.stdout.isatty(), as_json=as_json)
    else:
        _converse(found, sampling, num_tokens, as_json=as_json)
    return 0


# --- prompts ------------------------------------------------------------------------------------


def _text_of(prompt: str) -> str:
    """Return the text of the PROMPT argument."""
    if prompt == "-":
        content = b""
        # It may be closed: then it holds nothing.
        with suppress(OSError, ValueError, AttributeError):
            content = sys.stdin.buffer.read(_STDIN_MAX_BYTES + 1)
        if len(content) > _STDIN_MAX_BYTES:
            raise click.UsageError(f"standard input has more than {_STDIN_MAX_BYTES >> 20} MiB")
        # The end of the last line is seldom meant as a part of the text.
        return _decoded(content).removesuffix("\n")
    return _decoded(os.fsencode(prompt))


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8: byte {error.start} is wrong") from None


def _lines() -> Iterator[str]:
    """Yield the lines of standard input; on a terminal, ask for each."""
    if sys.stdin is None:
        return  # It is closed.
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield _decoded(line).removesuffix("\n")
        return
    # With it, `input` lets the user edit a line and find earlier ones.
    with suppress(ImportError):
        import readline  # noqa: F401
    getattr(sys.stdin, "reconfigure", lambda **_: None)(errors="surrogateescape")
    ask = "> " if sys.stdout.isatty() else ""
    with suppress(EOFError):
        while True:
            yield _decoded(os.fsencode(input(ask)))


# --- the model ----------------------------------------------------------------------------------


def _model_and_base(model: str, base: str | None) -> tuple[Path, Path | None]:
    """Return the folder of a model, and of the one that it changes if it is an adapter.

    None stands for the folder that the adapter names.
    """
    from decod.cli.hub import model_folder
    from decod.model.adapter_folder import hub_base_of, is_adapter

    folder = model_folder(model)
    if base is None and is_adapter(folder):
        base = hub_base_of(folder)
    return folder, None if base is None else model_folder(base)


def _given_model(model: str, device: str, base: str | None) -> "TextModel":
    from decod.cli.text_model import TextModel

    folder, base_dir = _model_and_base(model, base)
    with waiting(_LOADING):
        found = TextModel(folder, device, base_dir)
    _tell(f"model in {clean_text(folder, limit=4096)}, on {found.device}")
    return found


def _leaders_model(state_dir: Path, device: str) -> "TextModel":
    """Return the model of the run that this host leads, as of its last iteration."""
    from decod.cli.text_model import TextModel
    from decod.daemon.control import ask

    with _folder_in(state_dir) as folder:
        request = {"command": "export", "path": str(folder)}
        try:
            with waiting("the leader puts the model together"):
                answer = ask(state_dir, request, timeout_s=_EXPORT_TIMEOUT_S)
        except NotRunningError as error:
            fix = "give the leader's --state-dir, or an exported model with --model DIR"
            raise NotRunningError(error.what, why=error.why, fix=fix, code=error.code) from error
        if missing := answer.get("missing"):
            print_warning(f"the leader's model has {missing}")
        with waiting(_LOADING):
            _yield_to_training()
            # The run may need all of the GPU's memory.
            found = TextModel(folder, "cpu" if device == "auto" else device, _base_in(answer))
    iteration = clean_text(answer.get("iteration"))
    run = clean_text(answer.get("run"))
    _tell(f"model of iteration {iteration} of run {run}, on {found.device}")
    return found


def _yield_to_training() -> None:
    """Leave the processor to the run that trains on this host."""
    import torch

    os.nice(_NICENESS)
    # Threads that share a token's work would mostly wait for each other on a busy host.
    torch.set_num_threads(1)


@contextmanager
def _folder_in(state_dir: Path) -> Iterator[Path]:
    """Yield a new folder in which the daemon can write, for as long as the context lasts.

    It is in the state folder, since the daemon may see another /tmp, or may not write anywhere
    else. Folders that commands before have left behind are removed.
    """
    state_dir = full_path(state_dir)
    for old in state_dir.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError), _locked(old):
            shutil.rmtree(old, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(dir=state_dir, prefix=_FOLDER_PREFIX))
    except OSError:
        # Asking a daemon there, or its own attempt to write there, gives the error that fits.
        yield state_dir / f"{_FOLDER_PREFIX}0"
        return
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


# --- output -------------------------------------------------------------------------------------


def _continue(
    model: "TextModel",
    prompt: str,
    sampling: Sampling,
    num_tokens: int,
    *,
    echo: bool,
    as_json: bool,
) -> None:
    """Print what the model makes of a prompt, as it comes; `echo` prints the prompt before it."""
    prompt_ids = model.tokens_of(prompt)
    if len(prompt_ids) > model.context_max:
        print_warning(
            f"the prompt has {len(prompt_ids)} tokens: the model sees only the last "
            f"{model.context_max} of them"
        )
    if as_json:
        text = "".join(model.pieces(prompt_ids, sampling, num_tokens=num_tokens))
        click.echo(json_text({"prompt": prompt, "text": text}))
        return
    if echo:
        click.echo(click.style(_shown(prompt), bold=True), nl=False, color=use_color())
    for piece in model.pieces(prompt_ids, sampling, num_tokens=num_tokens):
        click.echo(_shown(piece), nl=False)
    click.echo()


def _converse(model: "TextModel", sampling: Sampling, num_tokens: int, *, as_json: bool) -> None:
    """Continue each line of standard input. On a terminal, Ctrl-C ends a text, not the command."""
    for number, line in enumerate(_lines()):
        # The same prompt again gives another text.
        each = replace(sampling, seed=sampling.seed + number)
        try:
            _continue(model, line, each, num_tokens, echo=False, as_json=as_json)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo()


def _shown(text: str) -> str:
    """Return a text as it may be printed.

    The weights come from strangers' hosts. On a terminal, their control characters could do harm.
    """
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _tell(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.argument("model", type=click.Path(file_okay=False))
@click.argument("corpus", type=CORPUS)
@_base_option
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="How many sequences of CORPUS are read; all if it has fewer.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Tokens of a sequence; as many as the model can see if left out.",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="cpu|auto|cuda:N", help="Computes there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: str,
    corpus: str,
    *,
    base: str | None,
    device: str,
    as_json: bool,
    **lengths: Any,
) -> None:
    """Say how well the model MODEL predicts a text.

    \b
    Examples:
      decod data prepare held-out/ held-out.txt
      decod evaluate ./model held-out/

    MODEL is a folder that `decod export` writes, or ORG/NAME on the Hugging Face Hub. CORPUS is
    what `decod data prepare` writes, or the URL of that. Text that the model was not trained with
    shows how much it has learnt.
    """
    from decod.data.corpus import open_corpus
    from decod.train.evaluate import evaluate as evaluated
    from decod.worker.configure import set_num_threads
    from decod.worker.device import choose_device

    begun_s = time.monotonic()
    set_num_threads({})
    chosen = choose_device(device)
    folder, base_dir = _model_and_base(model, base)
    read = waiting("predicting the text")
    with read, open_corpus(corpus) as dataset:
        found = evaluated(
            folder,
            dataset,
            num_sequences=lengths["sequences"],
            sequence_length=lengths["sequence_length"],
            device=chosen.name,
            base=base_dir,
        )
    seconds = time.monotonic() - begun_s
    answer = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "num_sequences": found.num_sequences,
        "num_tokens": found.num_tokens,
        "duration_s": round(seconds, 3),
        "unchecked": list(found.unchecked),
    }
    for text in found.unchecked:
        print_warning(text)
    if as_json:
        click.echo(json_text(answer))
        return
    click.echo(f"loss {found.loss:.4f} nats, perplexity {found.perplexity:.2f}")
    sequences = f"{found.num_sequences} sequences of {found.sequence_length}"
    click.echo(f"over {found.num_tokens} tokens in {sequences} (--sequence-length)")
