"""`decod generate`: text from an export or from the leader, and one line for each mistake."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decod.cli.main import main
from decod.errors import NetworkError
from tests.support.exports import MODEL, make_corpus, make_export, words_tokenizer, write_weights

torch.set_num_threads(1)

PROMPT = "the cat"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return make_export(folder / "model", make_corpus(folder / "corpus"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `decod generate`, and returns exit code, output and errors."""

    def generate(*arguments: object, device: str = "cpu") -> tuple[int, str, str]:
        words = ["generate", "--device", device, "--state-dir", tmp_path / "state", *arguments]
        code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return generate


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def their_text(model: Path, prompt: str, num_tokens: int) -> str:
    """What transformers makes of a prompt, from the same folder alone."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = theirs.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0]
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_greedy_text_is_that_of_transformers(model: Path, run: Run) -> None:
    code, out, err = run("--model", model, "--temperature", 0, "--max-tokens", 40, PROMPT)
    assert code == 0, err
    expected = their_text(model, PROMPT, 40)
    assert len(expected) > 10
    # A character that is cut at the end of the text is not printed.
    assert out == expected.rstrip("\N{REPLACEMENT CHARACTER}") + "\n"
    assert err == f"model in {model}, on CPU\n"


def test_special_tokens_in_a_prompt_are_those_of_transformers(model: Path, run: Run) -> None:
    """Who asks a chat model spells its turns out."""
    prompt = "the<|endoftext|>cat"
    code, out, err = run("--model", model, "--temperature", 0, "--max-tokens", 20, prompt)
    assert code == 0, err
    expected = their_text(model, prompt, 20).rstrip("\N{REPLACEMENT CHARACTER}")
    assert out == expected + "\n"
    plain = run("--model", model, "--temperature", 0, "--max-tokens", 20, "the<|endoftext |>cat")
    assert out != plain[1]


def test_words_keep_their_spaces(tmp_path: Path, run: Run) -> None:
    file = words_tokenizer(tmp_path / "words.json")
    folder = make_export(tmp_path / "model", make_corpus(tmp_path / "corpus", str(file)))
    code, out, _ = run("--model", folder, "--temperature", 0, "--max-tokens", 30, PROMPT)
    # Most of what the model knows has no word in this tokenizer.
    assert (code, out) == (0, their_text(folder, PROMPT, 30) + "\n")


def test_a_seed_gives_the_same_text_again(model: Path, run: Run) -> None:
    texts = [run("--model", model, "--seed", seed, PROMPT)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    fresh = {run("--model", model, PROMPT)[1] for _ in range(2)}
    assert len(fresh) == 2, "a new seed each time"


def test_the_prompt_may_come_from_standard_input(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = ("--model", model, "--temperature", 0)
    expected = run(*greedy, PROMPT)
    give_input(monkeypatch, PROMPT.encode() + b"\n")
    assert run(*greedy, "-") == expected


def test_prompts_are_read_line_by_line(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = ("--model", model, "--temperature", 0, "--max-tokens", 8)
    prompts = [PROMPT, "sat", ""]
    expected = "".join(run(*greedy, prompt)[1] for prompt in prompts)
    give_input(monkeypatch, b"the cat\nsat\n\n")
    assert run(*greedy, "--interactive")[:2] == (0, expected)


def test_a_prompt_that_is_longer_than_the_context_is_cut_with_a_warning(
    model: Path, run: Run
) -> None:
    greedy = ("--model", model, "--temperature", 0, "--max-tokens", 4)
    long = "the cat sat " * 20
    code, out, err = run(*greedy, long)
    assert code == 0
    assert "warning: the prompt has 240 tokens: the model sees only the last 64 of them" in err
    assert out == run(*greedy, long[-64:])[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1", "x"], "--temperature"),
        (["--temperature", "nan", "x"], "not a number"),
        (["--top-p", "0", "x"], "--top-p"),
        (["--top-p", "1.1", "x"], "--top-p"),
        (["--top-k", "-1", "x"], "--top-k"),
        (["--max-tokens", "0", "x"], "--max-tokens"),
        (["--seed", "one", "x"], "--seed"),
        ([], "give a PROMPT"),
        (["--interactive", "x"], "give a PROMPT"),
    ],
)
def test_nonsense_in_options_is_wrong_usage(arguments: list[str], named: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert named in err


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("tpu", "no device that torch knows"),
        ("cpu:0", "no device that torch knows"),
        ("cpu,cpu", "take several devices"),
    ],
)
def test_a_device_that_is_none_is_refused(device: str, words: str, run: Run) -> None:
    code, _, err = run("x", device=device)
    assert code == 3
    assert "E-CFG-021" in err
    assert words in err


def test_a_prompt_that_is_not_utf_8_is_wrong_usage(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_input(monkeypatch, b"ab\xff")
    code, _, err = run("--model", model, "-")
    assert code == 2
    assert "not UTF-8: byte 2" in err


def broken(folder: Path, how: str) -> Path:
    """A folder that is no whole export."""
    if how == "none":
        return folder / "nowhere"
    make_export(folder / "model", make_corpus(folder / "corpus"))
    weights = folder / "model/model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "text":
        weights.write_text("not a tensor")
    else:
        (folder / "model" / how).unlink()
    return folder / "model"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("none", ["E-DAT-043 there is no folder", "decod export"]),
        ("config.json", ["E-DAT-043", "holds no model", "decod export"]),
        ("model.safetensors", ["E-DAT-012 no model.safetensors"]),
        ("tokenizer.json", ["E-DAT-044", "has no tokenizer.json", "export the model again"]),
        ("cut", ["E-DAT-012 cannot read", "model.safetensors"]),
        ("text", ["E-DAT-012 cannot read", "model.safetensors"]),
    ],
)
def test_a_folder_that_is_no_export_is_one_line_with_the_remedy(
    how: str, named: list[str], tmp_path: Path, run: Run
) -> None:
    code, out, err = run("--model", broken(tmp_path, how), "x")
    assert (code, out) == (9, "")
    (line,) = err.splitlines()
    assert all(part in line for part in named), line
    assert "Try: " in line


def test_a_file_is_no_folder(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("--model", tmp_path / "file", "x")
    assert code == 9
    assert "Not a directory" in err


def test_without_a_leader_the_remedy_names_both_ways(run: Run, tmp_path: Path) -> None:
    for exists in (False, True):
        if exists:
            (tmp_path / "state").mkdir()
        code, out, err = run("x")
        assert (code, out) == (7, "")
        assert "give the leader's --state-dir, or an exported model with --model DIR" in err
    assert not list((tmp_path / "state").iterdir())


class FakeLeader:
    """Answers as the daemon of a leader does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
        self.paths: list[Path] = []
        self._dataset = make_corpus(corpus)
        monkeypatch.setattr("decod.daemon.control.ask", self._ask)
        monkeypatch.setattr("os.nice", lambda _: 0)

    def _ask(self, _: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.paths.append(Path(request["path"]))
        make_export(self.paths[-1], self._dataset)
        return {"iteration": 12, "run": "tiny", "path": request["path"], "missing": ""}


def test_the_leader_is_asked_for_its_model_which_does_not_stay(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir = tmp_path / "state"
    # An interrupted command has left a folder behind; another one reads a model just now.
    for name in (".decod-generate-old", ".decod-generate-busy", "generate-mine"):
        (state_dir / name).mkdir(parents=True)
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()",
         state_dir / ".decod-generate-busy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        leader = FakeLeader(monkeypatch, tmp_path / "corpus")
        greedy = ("--temperature", 0, "--max-tokens", 20, PROMPT)
        code, out, err = run(*greedy, device="auto")
        assert code == 0, err
        assert err == "model of iteration 12 of run tiny, on CPU\n"
        (path,) = leader.paths
        assert path.parent == state_dir
        left = {each.name for each in state_dir.iterdir()}
        assert left == {".decod-generate-busy", "generate-mine"}
        assert holder.stdin is not None
        holder.stdin.close()
    assert out == run("--model", model, *greedy)[1]


def test_the_leaders_own_error_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> dict[str, Any]:
        raise NetworkError("the run has not begun", why="w", fix="wait")

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    (tmp_path / "state").mkdir()
    assert run("x")[0] == 4
    assert not list((tmp_path / "state").iterdir())


def test_control_characters_of_a_model_do_not_reach_a_terminal(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Volunteers' hosts have made the weights. In a pipe, the text is as the model gives it."""
    arguments = ("--model", model, "--temperature", 5, "--seed", 3, "--max-tokens", 300, PROMPT)
    piped = run(*arguments)[1]
    assert "\x1b" in piped
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    shown = run(*arguments)[1]
    assert "\x1b" not in shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert PROMPT in shown


def test_a_model_of_transformers_with_several_end_tokens_works(tmp_path: Path, run: Run) -> None:
    folder = make_export(tmp_path / "model", make_corpus(tmp_path / "corpus"))
    greedy = ("--model", folder, "--temperature", 0, "--max-tokens", 20, PROMPT)
    whole = run(*greedy)[1].rstrip("\n")
    end = next(character for character in whole[1:] if character.isascii())
    ends = {"eos_token_id": [256, ord(end)]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    expected = whole[: whole.index(end)].rstrip("\N{REPLACEMENT CHARACTER}")
    assert run(*greedy)[1] == expected + "\n"


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, run: Run) -> None:
    folder = make_export(tmp_path / "model", make_corpus(tmp_path / "corpus"))
    write_weights(folder, dataclasses.replace(MODEL, vocab_size=64))
    code, _, err = run("--model", folder, "x")
    assert code == 9
    assert "E-DAT-016" in err
