"""From files of conversations to packed windows with marks."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from decod.cli.data_command import data, microbatch_lines
from decod.data.chat import ChatConfig, Renderer, conversation_of, load_chat, marked, pack
from decod.data.dataset import Dataset
from decod.data.index import BEGINS, MARK_SHIFT, TARGET, Index, read_index
from decod.data.prepare import PrepareConfig, prepare
from decod.data.sources import BadRecordError
from decod.data.template import ChatTemplate, RefusedError, TemplateError
from decod.data.tokenizer import load_tokenizer
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig
from tests.support.chat_models import CHATML, MISTRAL, conversation, templates, write_chat_model

LENGTH = 64
USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}
FORMS: list[dict[str, Any]] = [
    {"messages": [USER, ASSISTANT]},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "world"}]},
    {"prompt": "hello", "completion": "world"},
    {"prompt": [USER], "completion": [ASSISTANT]},
    {
        "prompt": "ignored",
        "messages": [USER, {"role": "assistant", "content": [{"text": "world"}]}],
    },
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), "chatml")


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(model: Path, out: Path, *names: Path, **options: Any) -> Index:
    config = {"chat": True, "sequence_length": LENGTH, "tokenizer": str(model), **options}
    return prepare(out, names, PrepareConfig(**config))


def items_of(out: Path) -> np.ndarray[Any, Any]:
    index = Dataset.open(out, verify=True).index
    shards = [np.fromfile(out / shard.file, "<u4") for shard in index.shards]
    return np.concatenate(shards)


def documents_of(out: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens and marks of all documents but padding, sorted."""
    with Dataset.open(out) as dataset:
        eos_id = dataset.index.tokenizer.eos_id
        found = [(each.token_ids, each.marks or []) for each in dataset.documents(2**20)]
        return sorted(each for each in found if set(each[0]) != {eos_id})


def test_all_forms_say_the_same(tmp_path: Path, model: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = write_lines(tmp_path / "a.jsonl", FORMS)
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(lines.read_bytes())
    names = [lines, tmp_path / "b.jsonl.gz"]
    for number, form in enumerate(FORMS[:4]):
        table = pa.table({name: [value] for name, value in form.items()} | {"other": [1]})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        names.append(tmp_path / f"{number}.parquet")
    index = run(model, tmp_path / "out", *names)
    assert index.marks is not None
    assert index.marks.conversations is not None
    assert index.marks.conversations.num_conversations == 14
    found = documents_of(tmp_path / "out")
    assert len(found) == 14
    assert found.count(found[0]) == 14
    encoder, _ = load_tokenizer(str(model))
    ids, marks = found[0]
    shown = encoder.decode(ids, with_special=True)
    assert shown == ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n")
    targets = [token for token, mark in zip(ids, marks, strict=True) if mark & TARGET]
    assert encoder.decode(targets, with_special=True) == "world<|im_end|>\n"


def test_only_the_completion_is_learnt_and_not_what_it_was_given(model: Path) -> None:
    earlier = {"role": "assistant", "content": "earlier"}
    record = {"prompt": [USER, earlier, USER], "completion": [ASSISTANT]}
    encoder, _ = load_tokenizer(str(model))
    chat = load_chat(str(model), encoder, sequence_length=LENGTH, train_on="answers")
    marked_template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] }}{% endgeneration %}{% endfor %}{% for message in messages %}",
    )
    for template, wanted in ((CHATML, "world<|im_end|>\n"), (marked_template, "world")):
        changed = ChatConfig(
            template=template, place="T", tokens={}, sequence_length=9, train_on=chat.train_on
        )
        with Renderer(changed) as renderer:
            text, answers = renderer.render(record)
            assert [text[begin:end] for begin, end in answers] == [wanted]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 50))
def test_windows_hold_every_conversation_once(sizes: list[int], room: int) -> None:
    windows = pack(sizes, room)
    assert sorted(place for window in windows for place in window) == list(range(len(sizes)))
    used = [sum(sizes[place] for place in window) for window in windows]
    assert all(0 < size <= room for size in used)
    # Two windows that would fit into one would be one.
    assert len(used) < 2 or sum(sorted(used)[:2]) > room
    assert windows == sorted(windows)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5),
    st.integers(2, 50),
    st.sampled_from(["answers", "all"]),
)
def test_marks_cover_answers_and_cuts_end_them(
    widths: list[int], spans: list[tuple[int, int]], length: int, train_on: Any
) -> None:
    """By definition: each token is compared with each character of an answer."""
    ends = np.cumsum(widths)
    offsets = np.stack([ends - widths, ends], axis=1)
    answers = [(min(span), max(span)) for span in spans]
    chat = ChatConfig(template="", place="", tokens={}, sequence_length=length, train_on=train_on)
    ids = np.arange(len(widths), dtype=np.uint32)
    counts = Counter[str]()
    items = marked(ids, offsets, answers, chat, counts)
    stands = [[begin <= place < end for begin, end in answers] for place in range(200)]
    inside = [
        [any(stands[place][n] for place in range(*pair)) for pair in offsets.tolist()]
        for n in range(len(answers))
    ]
    for row in inside:  # A token without characters is one if it stands between two.
        if any(row):
            first, last = row.index(True), len(row) - row[::-1].index(True)
            row[first:last] = [True] * (last - first)
    targets = [train_on == "all" or any(row[n] for row in inside) for n in range(len(widths))]
    targets[0] = False
    cuts = [len(row) - row[::-1].index(True) for row in inside if any(row)]
    size = len(widths)
    if not any(targets):
        size = 0
        assert counts == {"num_unanswered": 1}
    elif size > length:
        size = max((cut for cut in cuts if cut <= length), default=0)
        assert counts["num_cut"] + counts["num_too_long"] == 1
    assert (items & 0xFFFFFF).tolist() == list(range(size))
    assert (items >> MARK_SHIFT & TARGET > 0).tolist() == targets[:size]
    assert (items >> MARK_SHIFT & BEGINS > 0).tolist() == [n == 0 for n in range(size)]


def test_windows_are_those_of_a_run(tmp_path: Path, model: Path) -> None:
    draw = random.Random(3)
    records = [{"messages": conversation(draw, "chatml", num_turns=1)} for _ in range(60)]
    source = write_lines(tmp_path / "a.jsonl", records)
    index = run(model, tmp_path / "out", source, sequence_length=96, shard_tokens=1000)
    assert (index.num_tokens - 1) % 96 == 0
    items = items_of(tmp_path / "out")
    eos_id = index.tokenizer.eos_id
    for window in items[:-1].reshape(-1, 96):
        assert window[0] >> MARK_SHIFT == BEGINS
    marks = items >> MARK_SHIFT
    assert index.marks is not None
    assert index.marks.num_targets == np.count_nonzero(marks & TARGET)
    assert items[-1] == eos_id | BEGINS << MARK_SHIFT
    batch = BatchConfig(sequence_length=96, microbatch_size=2, num_microbatches=3)
    with Dataset.open(tmp_path / "out") as dataset:
        assert dataset.num_windows(96) == (index.num_tokens - 1) // 96
        dataset.require_batch(batch)
        mb = MicrobatchId(1, 0, 2)
        rows, row_marks = dataset.microbatch(mb, batch, 1), dataset.marks(mb, batch, 1)
        assert (row_marks[:, 0] == BEGINS).all()
        assert not (row_marks[:, -1] & TARGET).any()
        # Without its padding, every row is documents from begin to end.
        whole = {(tuple(ids), tuple(of)) for ids, of in documents_of(tmp_path / "out")}
        for row, of in zip(rows[:, :-1].tolist(), row_marks[:, :-1].tolist(), strict=True):
            starts = [n for n, mark in enumerate(of) if mark & BEGINS]
            for start, end in zip(starts, [*starts[1:], 96], strict=True):
                ids = row[start:end]
                assert set(ids) == {eos_id} or (tuple(ids), tuple(of[start:end])) in whole
        record = json.loads(next(microbatch_lines(dataset, batch, 1, 1)))
        assert record["marks"] == dataset.marks(MicrobatchId(1, 0, 0), batch, 1).tolist()
        for action in (dataset.require_batch, lambda b: dataset.microbatch(mb, b, 1)):
            with pytest.raises(DataError, match=r"E-DAT-026 .* windows of 96 .*has 32.*= 96"):
                action(BatchConfig(sequence_length=32))
    again = run(model, tmp_path / "again", source, sequence_length=96, shard_tokens=1000)
    assert again == index


def test_parts_are_packed_apart_and_end_at_a_window(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(4)
    records = [{"messages": conversation(draw, "chatml")} for _ in range(120)]
    source = write_lines(tmp_path / "a.jsonl", records)
    whole = run(model, tmp_path / "whole", source, sequence_length=512)
    monkeypatch.setattr("decod.data.encoding.cut_file.__defaults__", (4096,))
    monkeypatch.setattr("decod.data.encoding.group.__defaults__", (4096,))
    monkeypatch.setattr("decod.data.prepare.PART_SIZE_BYTES", 4096)
    index = run(model, tmp_path / "cut", source, sequence_length=512, shard_tokens=700)
    assert index.num_tokens > whole.num_tokens
    assert (index.num_tokens - 1) % 512 == 0
    assert documents_of(tmp_path / "cut") == documents_of(tmp_path / "whole")
    assert index.marks is not None
    assert whole.marks is not None
    assert index.marks == whole.marks


def test_long_conversations_are_cut_after_an_answer_and_told(tmp_path: Path, model: Path) -> None:
    long = {"role": "user", "content": "hello " * 100}
    records: list[Any] = [
        {"messages": [USER, ASSISTANT, USER, ASSISTANT, long, ASSISTANT]},
        {"messages": [long, ASSISTANT]},
        {"messages": [USER]},
        {"messages": [USER, ASSISTANT]},
    ]
    source = write_lines(tmp_path / "a.jsonl", records)
    arguments = ["prepare", str(tmp_path / "out"), str(source), "--tokenizer", str(model)]
    arguments += ["--chat", "--sequence-length", str(LENGTH)]
    told = CliRunner().invoke(data, arguments)
    assert told.exception is None, told.exception
    index = read_index(tmp_path / "out")
    assert index.marks is not None
    counts = index.marks.conversations
    assert counts is not None
    assert (counts.num_conversations, counts.num_cut) == (2, 1)
    assert (counts.num_too_long, counts.num_unanswered) == (1, 1)
    share = counts.num_tokens_lost / (counts.num_tokens + counts.num_tokens_lost)
    assert f"1 cut after an answer, 1 left out; {share:.1%} of the tokens are lost" in told.stdout
    assert "left out: 1 conversation without an answer" in told.stdout
    assert "windows are filled up with <|im_end|>" in told.stderr
    shown = CliRunner().invoke(data, ["show", str(tmp_path / "out")])
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦world<|im_end|>\n⟧"
    whole = "\n".join(shown.stdout.splitlines()[1:])
    assert f"in window 0\n{turn}{turn}\n--- document 2" in whole
    assert "--- document 3" not in whole, "padding is no document"
    # With all tokens as targets, a conversation without an answer is text to learn.
    everything = run(model, tmp_path / "all", source, train_on="all")
    assert everything.marks is not None
    assert everything.marks.conversations is not None
    assert everything.marks.conversations.num_conversations == 3
    items = items_of(tmp_path / "all") >> MARK_SHIFT
    ids, marks = documents_of(tmp_path / "all")[0]
    assert marks == [BEGINS] + [TARGET] * (len(ids) - 1)
    assert everything.marks.num_targets == np.count_nonzero(items & TARGET)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "it is not a JSON object"),
        ({"text": "x"}, "it is no conversation; its fields: 'text'"),
        ({"prompt": "x"}, "it is no conversation"),
        ({"messages": []}, "'messages' is no list of messages"),
        ({"messages": "x"}, "'messages' is no list of messages"),
        ({"messages": [1]}, "message 1 of 'messages' is no object"),
        ({"messages": [USER, {"role": "bot", "content": ""}]}, "message 2 .* has the role 'bot'"),
        ({"messages": [{"role": "user", "content": None}]}, "has no text"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "has no text"),
        ({"conversations": [{"from": None, "value": "x"}]}, "has the role None"),
        ({"prompt": "\ud800", "completion": "x"}, "half a surrogate pair"),
        ({"messages": [ASSISTANT, USER]}, "it begins with an answer"),
    ],
)
def test_a_bad_record_is_named_or_left_out(
    tmp_path: Path, model: Path, record: Any, reason: str
) -> None:
    # The first turn can't be told: this template writes its first token with it.
    folder = write_chat_model(tmp_path / "model", "chatml", "{{ messages[0].role }}" + CHATML)
    source = write_lines(tmp_path / "a.jsonl", [FORMS[0], record])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2 cannot be used: .*{reason}"):
        run(folder, tmp_path / "out", source)
    index = run(folder, tmp_path / "out", source, skip_bad=True)
    assert index.skipped is not None
    assert index.skipped.num_records == 1
    assert len(documents_of(tmp_path / "out")) == 1


def test_a_bad_row_and_a_table_of_something_else_are_named(tmp_path: Path, model: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"messages": [[USER, ASSISTANT], None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"E-DAT-013 .*row 2: it is no conversation"):
        run(model, tmp_path / "out", tmp_path / "a.parquet")
    assert run(model, tmp_path / "out", tmp_path / "a.parquet", skip_bad=True).skipped is not None
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"none of the columns messages, conversations"):
        run(model, tmp_path / "out", tmp_path / "b.parquet", force=True)


def test_what_holds_no_conversations_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(DataError, match=r"E-DAT-011 .*README\.md holds no conversations"):
        run(model, tmp_path / "out", tmp_path / "README.md")
    source = write_lines(tmp_path / "a.jsonl", [{"messages": [USER]}])
    with pytest.raises(DataError, match=r"E-DAT-017 .*no conversation to train on: 1 have no ans"):
        run(model, tmp_path / "out", source)


def test_a_template_is_found_in_either_file_and_must_fit(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", FORMS)
    folder = write_chat_model(tmp_path / "model", "chatml")
    first = run(folder, tmp_path / "one", source)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"E-DAT-070 .* has no chat template"):
        run(folder, tmp_path / "two", source)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    for number, value in enumerate((CHATML, named)):
        text = json.dumps(config | {"chat_template": value})
        (folder / "tokenizer_config.json").write_text(text)
        assert run(folder, tmp_path / f"{number}", source).sha256 == first.sha256
    text = json.dumps(config | {"chat_template": "{{ bos_token }}", "bos_token": "<bos>"})
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(DataError, match=r"E-DAT-015 .*bos_token is '<bos>': tokenizer\.json has"):
        run(folder, tmp_path / "two", source)
    with pytest.raises(DataError, match="E-DAT-070 bytes has no chat template"):
        prepare(tmp_path / "two", [source], PrepareConfig(chat=True, sequence_length=LENGTH))


def test_a_template_that_rewrites_what_it_wrote_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    folder = write_chat_model(tmp_path / "model", "qwen3", templates("qwen3")[0])
    source = write_lines(tmp_path / "a.jsonl", [{"messages": [USER, ASSISTANT] * 2}])
    with pytest.raises(DataError, match=r"E-DAT-072 .*chat_template\.jinja.*--train-on all"):
        run(folder, tmp_path / "out", source, skip_bad=True)
    run(folder, tmp_path / "out", source, train_on="all")


HARMFUL = {
    "{% include '/etc/passwd' %}": "its line 1 reads another file",
    "{% set x = 1 %}\n{% import 'x' as y %}": "its line 2 reads another file",
    "{{ messages.__class__.__mro__ }}": "it does what the sandbox forbids",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "it does what the sandbox forbids",
    "{{ namespace(__class__=1) }}": "it does what the sandbox forbids",
    "{% set _ = messages.append(1) %}": "it does what the sandbox forbids",
    "{{ 'a' * 10 ** 11 }}": "it takes too much memory",
    "{{ '%0999999999999d' % 1 }}": "it takes too much memory",
    "{% for i in range(9**5) %}{% for j in range(9**5) %}aaaaaaaaaaa{% endfor %}{% endfor %}": (
        "it makes more than"
    ),
    "{% for message in messages %}": "it is no template of jinja2",
}


@pytest.mark.parametrize("template", HARMFUL)
def test_a_harmful_template_does_no_harm(template: str) -> None:
    chat = ChatConfig(template=template, place="FILE", tokens={}, sequence_length=9, train_on="all")
    with (
        pytest.raises(DataError, match=f"E-DAT-070 .*FILE cannot be used: {HARMFUL[template]}"),
        Renderer(chat) as renderer,
    ):
        renderer.render(FORMS[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",
    ],
)
def test_a_template_without_end_is_ended(template: str) -> None:
    """Also while it is in a function that nothing of Python's can interrupt."""
    chat = ChatConfig(template=template, place="FILE", tokens={}, sequence_length=9, train_on="all")
    with (
        pytest.raises(DataError, match=r"E-DAT-071 .*FILE cannot be used: .* loop for ever"),
        Renderer(chat) as renderer,
    ):
        renderer.render(FORMS[0])


def test_a_process_that_dies_is_an_error(model: Path) -> None:
    chat = ChatConfig(template=CHATML, place="FILE", tokens={}, sequence_length=9, train_on="all")
    with Renderer(chat) as renderer:
        renderer._process.kill()
        renderer._process.wait()
        with pytest.raises(DataError, match=r"E-DAT-071 .* has ended with -9"):
            renderer.render(FORMS[0])


def test_templates_have_the_functions_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    source = (
        "{% set ns = namespace(n=0, self=2) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ ns.n }} {{ ns.self }} {{ dict(a=1) | tojson(indent=2) }} {{ bos_token }}"
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ x is defined }}"
        "\n  {% if true %}\n  <é>\n  {% endif %}\n{{ ['é'] | tojson }} {{ dict.fromkeys('ab') }}"
        "{%- if strftime_now is defined %}{{ strftime_now('%d') | length }}{% endif %}"
    )
    messages = [{"role": "system", "content": "x"}, USER, ASSISTANT]
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    wanted, _ = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=source, bos_token="<s>"
    )
    assert [rendered.text] == wanted


def test_a_template_refuses_what_it_says() -> None:
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(RefusedError, match="the template says: Conversation roles must alternate"):
        template.render([USER, USER])
    with pytest.raises(RefusedError, match="the template fails: UndefinedError"):
        ChatTemplate("{{ messages[7].x.y }}", {}).render([USER])
    with pytest.raises(TemplateError, match="reads another file"):
        ChatTemplate("{% extends 'x' %}", {})
    assert template.render([USER, ASSISTANT]).text == "<s>[INST] hello [/INST]world</s>"


def test_names_of_roles_are_translated() -> None:
    said = [{"from": name, "value": name} for name in ("system", "human", "gpt", "user", "tool")]
    found = conversation_of({"conversations": said})
    roles = [message["role"] for message in found.messages]
    assert roles == ["system", "user", "assistant", "user", "tool"]
    with pytest.raises(BadRecordError, match="has the role 'function_call', not system"):
        conversation_of({"conversations": [{"from": "function_call", "value": ""}]})


@pytest.mark.parametrize(
    "options",
    [
        ["--chat"],
        ["--sequence-length", "9"],
        ["--document-masks", "--chat", "--sequence-length", "9"],
    ],
)
def test_options_that_do_not_belong_together_are_a_usage_error(
    tmp_path: Path, options: list[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", FORMS)
    found = CliRunner().invoke(data, ["prepare", str(tmp_path / "out"), str(source), *options])
    assert found.exit_code == 2
