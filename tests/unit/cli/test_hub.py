"""Models from the Hugging Face Hub, which a server on loopback plays, and back to it."""

import errno
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch

from decod.cli import hub as client
from decod.cli.hub import model_folder
from decod.cli.main import main
from decod.daemon.exporting import base_model_of
from decod.errors import DataError, DecodError, HardwareError, NetworkError
from decod.files import hub_name
from decod.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE, all_adapters
from decod.model.writing import ModelWriter
from decod.run.adapter_config import AdapterConfig, AdapterKind
from tests.support.exports import MODEL, make_corpus, make_export
from tests.support.hub_server import TOKEN, HubServer, Repository, asked_hub

torch.set_num_threads(1)

NAME = "someone/tiny"
WEIGHTS = "model.safetensors"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    exported = make_export(folder / "model", make_corpus(folder / "corpus"))
    for name in ("modeling_tiny.py", "pytorch_model.bin", "tiny.gguf", "consolidated.safetensors"):
        (exported / name).write_bytes(b"not to be fetched" * 1000)
    (exported / "onnx").mkdir()
    (exported / "onnx/config.json").write_text("{}")
    return exported


@pytest.fixture
def hub(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # Before they try again, decod and the library wait some seconds.
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.chdir(tmp_path)
    with asked_hub(tmp_path / "home", monkeypatch) as server:
        server.add(NAME, model)
        yield server


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `decod`, and returns exit code, output and errors."""

    def each(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return each


def head(hub: HubServer, name: str = NAME) -> str:
    return hub.repositories[name].revisions["main"]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a/b", ("a/b", "")),
        ("a/b@v1.0", ("a/b", "v1.0")),
        ("a/b@refs/pr/4", ("a/b", "refs/pr/4")),
        *(
            (text, None)
            for text in ("b", "a/b/c", "./a/b", "/a/b", "~/a", "../b", "a/b@", "a/b@-x")
        ),
        *((text, None) for text in ("a/b@../../x", "a/b@/x", "a/b@x\n", "https://hub/a/b", "")),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_path(text: str, found: tuple[str, str] | None) -> None:
    assert hub_name(text) == found


def test_a_folder_that_is_there_is_taken_as_before(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert model_folder(NAME) == tmp_path / NAME
    assert model_folder("./no/folder") == tmp_path / "no/folder"
    assert hub.asked == []


# --- fetching ------------------------------------------------------------------------------------


def test_what_decod_reads_is_fetched_once_and_named_by_its_commit(
    hub: HubServer, model: Path
) -> None:
    folder = model_folder(NAME)
    names = {path.name for path in folder.iterdir()}
    assert {WEIGHTS, "config.json", "tokenizer.json", "generation_config.json"} <= names
    assert not names & {"modeling_tiny.py", "pytorch_model.bin", "tiny.gguf", "onnx"}
    assert "consolidated.safetensors" not in names
    for name in names:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert base_model_of(folder) == f"{NAME}@{head(hub)}"
    fetched = hub.fetched.total()
    assert model_folder(f"{NAME}@main") == folder
    assert hub.fetched.total() == fetched


def test_a_revision_is_resolved_once(hub: HubServer) -> None:
    repository, first = hub.repositories[NAME], head(hub)
    repository.revisions["v1"] = first
    second = repository.commit({"generation_config.json": b"{}"}, "second")
    assert model_folder(f"{NAME}@v1").name == model_folder(f"{NAME}@{first}").name == first
    assert model_folder(NAME).name == second
    hub.asked.clear()
    model_folder(NAME)
    assert [each for each in hub.asked if "/revision/main" in each] == [
        f"GET /api/models/{NAME}/revision/main"
    ]


def test_only_the_files_of_a_tokenizer_are_fetched_for_data(
    hub: HubServer, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat")
    code, out, err = run("data", "prepare", tmp_path / "c", tmp_path / "a.txt", "--tokenizer", NAME)
    assert code == 0, err
    assert "vocabulary 257" in out
    assert hub.fetched["tokenizer.json"] == 1
    assert WEIGHTS not in hub.fetched
    assert "README.md" not in hub.fetched


def test_a_connection_that_breaks_goes_on_where_it_was(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library writes in pieces of this size, so it goes on from whole ones.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.breaks[WEIGHTS] = [1000, 5500]
    folder = model_folder(NAME)
    assert (folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    assert [start for name, start in hub.ranges if name == WEIGHTS] == [0, 1000, 6000]


def test_a_connection_that_is_reset_is_made_again(hub: HubServer, model: Path) -> None:
    hub.breaks[WEIGHTS], hub.resets = [1000], True
    assert (model_folder(NAME) / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    assert hub.fetched["config.json"] == 1


def test_ctrl_c_ends_the_threads_that_fetch() -> None:
    # A shell starts programs in the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with client._stoppable(lambda _: None) as bar:
        fetching = bar(total=1)
        fetching.update(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            fetching.update(1)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_after_several_tries_the_next_command_goes_on(hub: HubServer, run: Run) -> None:
    hub.breaks[WEIGHTS] = [0] * 100
    code, _, err = run("generate", "--model", NAME, "x")
    assert code == 4
    assert "E-NET-041" in err
    assert "it goes on with the files that are missing" in err
    assert "Traceback" not in err
    del hub.breaks[WEIGHTS]
    fetched = hub.fetched["tokenizer.json"]
    assert (model_folder(NAME) / WEIGHTS).exists()
    assert hub.fetched["tokenizer.json"] == fetched == 1


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_file_with_another_hash_is_refused_and_forgotten(
    file: str, hub: HubServer, model: Path
) -> None:
    content = (model / file).read_bytes()
    hub.altered[file] = content[:-2] + b"x" + content[-1:]
    with pytest.raises(DataError, match=rf"{file} of {NAME} is not the file .* Try: run") as caught:
        model_folder(NAME)
    assert caught.value.code == "E-DAT-064"
    del hub.altered[file]
    assert (model_folder(NAME) / file).read_bytes() == content


def test_a_damaged_copy_in_the_cache_is_refused(hub: HubServer) -> None:
    path = model_folder(NAME) / WEIGHTS
    with path.open("r+b") as copy:
        copy.seek(-1, 2)
        copy.write(b"?")
    with pytest.raises(DataError, match="is not the file that the Hub names"):
        model_folder(NAME)


def test_progress_counts_the_bytes(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, list[int]] = {}

    class Shown:
        def __init__(self, title: str, num_bytes: int) -> None:
            self.counts = counts.setdefault(title, [num_bytes, 0])

        def __enter__(self) -> Callable[[int], None]:
            return self.advance

        def __exit__(self, *_: object) -> None: ...

        def advance(self, num_bytes: int) -> None:
            self.counts[1] += num_bytes

    monkeypatch.setattr(client, "progress", Shown)
    model_folder(NAME)
    assert counts.keys() == {f"fetching {NAME}", f"checking {NAME}"}
    for wanted, done in counts.values():
        assert wanted == done > (model / WEIGHTS).stat().st_size


# --- refusals ------------------------------------------------------------------------------------


def test_each_refusal_is_one_error_with_a_remedy(hub: HubServer, run: Run, model: Path) -> None:
    hub.add("someone/gated", model, is_gated=True)
    hub.add("someone/hidden", model, is_private=True)
    hub.repositories["someone/pickled"] = Repository()
    hub.repositories["someone/pickled"].commit({"pytorch_model.bin": b"x", "a.json": b"{}"}, "m")
    for name, told in (
        ("someone/nothing", r"no model someone/nothing on the Hub, and no such folder here"),
        ("someone/hidden", r"no model someone/hidden .* for a private model set HF_TOKEN"),
        (f"{NAME}@v9", rf"{NAME} has no revision v9: .*/{NAME}/commits/main"),
        (f"{NAME}@{'0' * 40}", rf"{NAME} has no revision 0000"),
        (
            "someone/gated",
            r"is gated.* HF_TOKEN is not set\. Try: accept its licence at http.*HF_TOKEN",
        ),
        ("someone/pickled", r"someone/pickled has no safetensors at main: .*could run code"),
    ):
        code, out, err = run("generate", "--model", name, "x")
        assert (code, out) == (9, ""), err
        (line,) = [line for line in err.splitlines() if not line.startswith("fetching")]
        assert re.search(rf"error: E-DAT-063 .*{told}", line), line


def test_access_opens_what_is_gated(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/gated", model, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (model_folder("someone/gated") / WEIGHTS).exists()
    monkeypatch.setenv("HF_TOKEN", "hf_NoLongerValidToken000000000000")
    with pytest.raises(DataError, match="does not know the token"):
        model_folder("someone/gated")


def test_offline_the_cache_must_have_it_all(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set") as caught:
        model_folder(NAME)
    assert caught.value.code == "E-DAT-065"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = model_folder(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert model_folder(NAME) == model_folder(f"{NAME}@{head(hub)}") == folder
    (folder / WEIGHTS).unlink()
    with pytest.raises(DataError, match="not in the cache as a whole"):
        model_folder(NAME)
    assert hub.asked == []


def test_a_hub_that_is_down_does_not_stop_who_has_it_all(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.status = 503
    with pytest.raises(NetworkError, match=r"can't be reached.* 503"):
        model_folder(NAME)
    hub.status = None
    folder = model_folder(NAME)
    hub.status = 503
    assert model_folder(NAME) == folder
    assert "the Hub does not answer" in capfd.readouterr().err


def test_a_full_disk_is_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    with pytest.raises(HardwareError, match=r"are missing.* HF_HOME") as caught:
        model_folder(NAME)
    assert WEIGHTS not in hub.fetched
    assert caught.value.exit_code == 6
    monkeypatch.undo()


def test_a_disk_that_fills_up_is_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuse)
    with pytest.raises(HardwareError, match=r"can't be kept in .*: No space left on device"):
        model_folder(NAME)


# --- what is fetched is used ---------------------------------------------------------------------


def test_each_command_takes_a_name(hub: HubServer, run: Run, model: Path, tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    code, out, err = run("run", "init", tmp_path / "run.toml", "--from", NAME)
    assert code == 0, err
    assert f"--init {NAME}" in out
    text = (tmp_path / "run.toml").read_text()
    assert f'base_model = "{NAME}"' in text
    changed = re.sub(r"(?m)^sequence_length = .*", "sequence_length = 16", text)
    (tmp_path / "run.toml").write_text(
        re.sub(r"(?m)^num_microbatches = .*", "num_microbatches = 1", changed)
    )
    code, out, err = run("run", "check", tmp_path / "run.toml", "--init", NAME)
    assert code == 0, err
    assert head(hub) in out
    for words in (("--model", NAME), ("--model", model)):
        code, out, err = run("generate", *words, "--temperature", 0, "--max-tokens", 9, "the")
        assert code == 0, err
        assert out
    code, out, err = run("evaluate", f"{NAME}@main", tmp_path / "corpus", "--json")
    assert code == 0, err
    assert json.loads(out)["num_tokens"] > 0


def test_an_adapter_takes_its_model_from_the_hub(
    hub: HubServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = head(hub)
    hub.repositories[NAME].commit({"config.json": b"{}"}, "of another model")
    adapter = AdapterConfig(kind=AdapterKind.LORA, rank=2, alpha=4.0)
    folder = tmp_path / "adapter"
    with closing(ModelWriter(folder, MODEL, adapter, f"{NAME}@{first}")) as writer:
        for name, shape in all_adapters(MODEL, adapter).items():
            writer.write(name, memoryview(bytes(4 * math.prod(shape))))
        writer.finish()
    settings = peft.PeftConfig.from_pretrained(folder)
    assert (settings.base_model_name_or_path, settings.revision) == (NAME, first)
    shutil.copyfile(model_folder(f"{NAME}@{first}") / "tokenizer.json", folder / "tokenizer.json")
    words = ("--model", folder, "--temperature", 0, "--max-tokens", 20, "the")
    code, out, err = run("generate", *words)
    assert code == 0, err
    assert run("generate", "--model", f"{NAME}@{first}", *words[2:])[1] == out
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, err = run("push", "someone/adapter", "--from", folder)
    assert code == 0, err
    assert {ADAPTER_CONFIG, ADAPTER_FILE} <= hub.repositories["someone/adapter"].files.keys()
    code, _, err = run("generate", "--model", "someone/adapter", "--max-tokens", 1, "the")
    assert code == 0, err
    local = json.loads((folder / ADAPTER_CONFIG).read_text())
    local["base_model_name_or_path"] = str(model_folder(f"{NAME}@{first}"))
    (folder / ADAPTER_CONFIG).write_text(json.dumps(local))
    code, _, err = run("push", "someone/adapter", "--from", folder)
    assert code == 0, err
    assert "names a folder of this host" in err


def test_dry_runs_and_services_fetch_nothing(hub: HubServer, run: Run) -> None:
    run("join", "--dry-run", "decod1-abc", "--base", NAME)
    assert hub.asked == []


# --- uploading -----------------------------------------------------------------------------------


@pytest.fixture
def leader(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A leader that exports; returns its state folder."""
    dataset = make_corpus(tmp_path / "corpus")

    def ask(_: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        make_export(Path(request["path"]), dataset)
        return {"iteration": 12, "run": "tiny", "path": request["path"], "missing": ""}

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_a_push_is_one_commit_of_the_same_bytes(
    hub: HubServer, leader: Path, run: Run, model: Path
) -> None:
    code, out, err = run("push", "someone/new", "--private", "--state-dir", leader)
    assert code == 0, err
    assert out == f"run tiny, iteration 12 is at {hub.url}/someone/new\n"
    repository = hub.repositories["someone/new"]
    assert repository.is_private
    assert repository.messages == ["initial commit", "Upload run tiny, iteration 12"]
    names = {path.name for path in model.iterdir() if path.name in repository.files}
    assert {WEIGHTS, "config.json", "README.md", "tokenizer.json"} <= names
    assert repository.files.keys() == names | {".gitattributes"}
    for name in names - {"consolidated.safetensors"}:
        assert repository.files[name] == (model / name).read_bytes()
    assert not list(leader.iterdir()), "no folder stays"


def test_a_folder_is_checked_before_it_is_pushed(
    hub: HubServer, run: Run, model: Path, tmp_path: Path, leader: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(model, folder)
    (folder / ".env").write_text("SECRET=1")
    (folder / "consolidated.safetensors").unlink()
    code, out, err = run("push", "someone/mine", "--from", folder)
    assert code == 0, err
    assert out.startswith("run tiny, iteration 40 is at ")
    repository = hub.repositories["someone/mine"]
    assert repository.messages[-1] == "Upload run tiny, iteration 40"
    assert not {".env", "modeling_tiny.py", "pytorch_model.bin"} & repository.files.keys()
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    code, _, err = run("push", "someone/other", "--from", folder)
    assert code == 9
    assert "cut off" in err
    assert "someone/other" not in hub.repositories


def test_a_push_that_may_not_write_is_told(
    hub: HubServer, leader: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run("push", "others/model", "--state-dir", leader)
    assert code == 3
    assert "no access to write to others/model" in err
    assert "the token is of an account without it" in err
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = run("push", "someone/new", "--state-dir", leader)
    assert code == 3
    assert "HF_TOKEN is not set" in err
    assert "someone/new" not in hub.repositories
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for words in (("someone/new@main",), ("someone/new", "--base", NAME), ("new",)):
        assert run("push", *words, "--state-dir", leader)[0] == 2
    # A folder that is not there is no name on the Hub here.
    code, _, err = run("push", "someone/new", "--from", NAME)
    assert code == 9, err
    assert f"there is no folder {Path.cwd() / NAME}" in err


def test_a_push_never_makes_a_mixture_nor_shows_what_is_private(
    hub: HubServer, leader: Path, run: Run
) -> None:
    hub.repositories["someone/else"] = other = Repository()
    other.commit({ADAPTER_CONFIG: b"{}"}, "theirs")
    code, _, err = run("push", "someone/else", "--state-dir", leader)
    assert code == 3
    assert f"someone/else holds {ADAPTER_CONFIG}" in err
    code, _, err = run("push", NAME, "--private", "--state-dir", leader)
    assert code == 3
    assert "is there already, and public" in err
    assert other.messages == ["theirs"]


def test_an_upload_that_breaks_is_tried_again(
    hub: HubServer, leader: Path, run: Run, model: Path
) -> None:
    oid = hashlib.sha256((model / WEIGHTS).read_bytes()).hexdigest()
    hub.breaks[oid] = [0, 0]
    code, _, err = run("push", "someone/new", "--state-dir", leader)
    assert code == 0, err
    assert WEIGHTS in hub.repositories["someone/new"].files


# --- the token -----------------------------------------------------------------------------------


def test_the_token_is_in_no_output_and_no_file(
    hub: HubServer,
    leader: Path,
    run: Run,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever fails, and even if the server says it back."""
    monkeypatch.setattr("huggingface_hub.constants.HF_DEBUG", True)
    huggingface_hub.utils.logging.set_verbosity_debug()
    said = []
    corpus = tmp_path / "corpus"
    hub.breaks[WEIGHTS] = [1000]
    for status in (None, 400, 401, 403, 404, 429, 500):
        hub.status, hub.words = status, f"the token {TOKEN} is bad"
        for words in (
            ("generate", "--model", "someone/nothing", "x"),
            ("generate", "--model", NAME, "--max-tokens", 1, "x"),
            ("evaluate", NAME, corpus),
            ("run", "init", "-", "--from", NAME),
            ("push", "someone/new", "--state-dir", leader),
            ("push", "others/new", "--state-dir", leader),
        ):
            said += [text for text in run(*words)[1:] if text]
    assert TOKEN in hub.tokens
    # Bytes that no header may hold: libraries say the whole header then.
    hub.status = None
    for bad in (f"{TOKEN}\x07", f"{TOKEN}\N{EURO SIGN}"):
        monkeypatch.setenv("HF_TOKEN", bad)
        code, out, err = run("generate", "--model", "someone/nothing", "x")
        assert code in (3, 4, 9), err
        assert "Traceback" not in err
        said += [out, err]
    huggingface_hub.utils.logging.set_verbosity_warning()
    assert any("the token [token] is bad" in text for text in said)
    assert not [text for text in said if TOKEN in text]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_errors_hold_no_word_of_the_library(hub: HubServer) -> None:
    hub.status = 500
    with pytest.raises(DecodError) as caught:
        model_folder(NAME)
    assert caught.value.__suppress_context__


def test_huggingface_hub_is_not_imported_for_folders() -> None:
    code = (
        "import sys\n"
        "from decod.cli.hub import model_folder\n"
        "model_folder('./here')\n"
        "import decod.cli.model_command, decod.cli.leader_command, decod.cli.join_command\n"
        "assert not [m for m in sys.modules if m.startswith('huggingface_hub')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert huggingface_hub.__version__
