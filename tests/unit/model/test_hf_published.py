"""Folders of published models, scaled down: transformers' loss and text, or the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decod.cli.text_model import TextModel
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.model.sampling import Sampling
from decod.run.training_config import BatchConfig
from decod.train.evaluate import evaluate
from decod.train.model_folder import judge_folder
from tests.support.published_models import PUBLISHED, Published, byte_tokenizer

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LENGTH, ROWS, NUM_TOKENS = 48, 4, 16
TEXT = "It was the best of times, it was the worst of times. " * 40
PROMPT = "It was"
ROOT = Path(__file__).parents[3]
EXACT = [each for each in PUBLISHED if not each.refused]
REFUSED = [each for each in PUBLISHED if each.refused]


def write_folder(folder: Path, published: Published) -> None:
    """Writes what `hf download` fetches: description, weights and tokenizer."""
    folder.mkdir()
    description = folder / "config.json"
    description.write_text(json.dumps(published.fields))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(spread * torch.randn_like(parameter))
    model.to(getattr(torch, published.stored)).save_pretrained(folder)
    # transformers has written another one, in the spelling of its own release.
    description.write_text(json.dumps(published.fields))
    (folder / "generation_config.json").unlink(missing_ok=True)
    begins = "<s>" if published.adds_bos else ""
    (folder / "tokenizer.json").write_text(byte_tokenizer(["<s>", "</s>"], begins=begins))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT)
    return path


def their_loss(model: Any, dataset: Dataset) -> float:
    batch = BatchConfig(sequence_length=LENGTH, microbatch_size=ROWS, num_microbatches=1)
    rows = torch.from_numpy(dataset.microbatch(MicrobatchId(1, 0, 0), batch, seed=0))
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


def their_text(folder: Path, model: Any) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :]
    # A character that is not complete is printed by one, and kept back by the other.
    return str(tokenizer.decode(new, skip_special_tokens=True)).rstrip("\N{REPLACEMENT CHARACTER}")


def loaded(folder: Path, dtype: str) -> Any:
    """The model as transformers loads it, without a warning."""
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return theirs.eval()


@pytest.mark.parametrize("published", EXACT, ids=lambda each: each.name)
def test_loss_and_greedy_text_are_those_of_transformers(
    published: Published, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_folder(folder, published)
    prepare(tmp_path / "corpus", [text], PrepareConfig(tokenizer=str(folder)))
    # decod computes in float32 what is stored as float16.
    own_dtype = judge_folder(folder).config.dtype.value
    with Dataset.open(tmp_path / "corpus") as dataset:
        assert dataset.index.tokenizer.bos_id == (256 if published.adds_bos else None)
        # bfloat16 rounds so much that two kernels of transformers differ as much.
        for dtype, tolerance in ((own_dtype, 5e-3), ("float32", 1e-5)):
            description = json.dumps(published.fields | {"torch_dtype": dtype})
            (folder / "config.json").write_text(description)
            theirs = loaded(folder, dtype)
            found = evaluate(folder, dataset, num_sequences=ROWS, sequence_length=LENGTH)
            assert found.loss == pytest.approx(their_loss(theirs, dataset), rel=tolerance)
            assert found.unchecked == ()
    ours = TextModel(folder, "cpu")
    greedy = Sampling(temperature=0, seed=0)
    pieces = ours.pieces(ours.tokens_of(PROMPT), greedy, num_tokens=NUM_TOKENS)
    assert "".join(pieces).rstrip("\N{REPLACEMENT CHARACTER}") == their_text(folder, theirs)


@pytest.mark.parametrize("published", REFUSED, ids=lambda each: each.name)
def test_what_decod_does_not_compute_is_refused_by_the_field(
    published: Published, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.fields))
    with pytest.raises(DataError, match=rf"E-DAT-011 config\.json: {published.refused} is "):
        judge_folder(tmp_path)


def test_dropout_matters_only_in_training(tmp_path: Path) -> None:
    published = next(each for each in EXACT if each.fields["model_type"] == "gpt2")
    write_folder(tmp_path / "model", published)
    assert judge_folder(tmp_path / "model").config.num_hidden_layers == 2
    with pytest.raises(DataError, match=r"set attn_pdrop, embd_pdrop, resid_pdrop to 0\.0"):
        judge_folder(tmp_path / "model", trains=True)


def table() -> str:
    """The table in docs/models.md: a row for each result of a type; other types share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in PUBLISHED:
        result = f"refused: `{each.refused}`" if each.refused else "as transformers"
        model_type = "others" if each.refused == "model_type" else each.fields["model_type"]
        if model_type == "gpt2" and not each.refused:
            result += "; to train it, set its dropouts to 0"
        rows.setdefault((model_type, result), []).append(each.name)
    lines = ["| `model_type` | result | folders |", "|---|---|---|"]
    lines += [f"| {kind} | {result} | {', '.join(rows[kind, result])} |" for kind, result in rows]
    return "\n".join(lines)


def test_the_documents_show_what_was_tried() -> None:
    assert len(PUBLISHED) >= 40
    assert table() in (ROOT / "docs/models.md").read_text()
