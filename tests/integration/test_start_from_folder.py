"""A model that transformers saved is where a run starts, relays included."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decod.model.weights import read_config
from decod.run.model_config import ModelDtype
from tests.support.cluster import Cluster, assert_refused, run_decod
from tests.support.oracle import assert_agreement, import_transformers, transformers_loss
from tests.support.quick import first_of
from tests.support.runs import make_run, microbatches

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def save_random_model(folder: Path, model_type: str) -> None:
    """Writes a tiny model whose weights are large enough to matter, as transformers writes it."""
    transformers = import_transformers()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    if model_type == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=257,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=32,
            initializer_range=0.2,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=256,
            eos_token_id=256,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        kind = {"qwen3": "Qwen3", "olmo2": "Olmo2"}.get(model_type, "Llama")
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.2,
            rope_parameters=LLAMA3 if model_type == "llama3" else None,
            tie_word_embeddings=model_type == "qwen3",
            **({"head_dim": 16} if model_type == "qwen3" else {}),
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder, max_shard_size="50KB" if model_type == "qwen3" else "1GB")


@pytest.mark.parametrize("model_type", first_of(["qwen3", "gpt2", "llama3", "llama", "olmo2"], 2))
def test_the_first_loss_is_that_of_transformers(
    tmp_path: Path, corpus: Path, model_type: str
) -> None:
    save_random_model(tmp_path / "theirs", model_type)
    model = read_config(tmp_path / "theirs", dtype=ModelDtype.FLOAT32)
    run = replace(make_run(num_iterations=2, min_nodes_per_stage=1), model=model)
    with Cluster(tmp_path / "cluster", run, corpus) as cluster:
        arguments = ("--init", tmp_path / "theirs", "--export", tmp_path / "ours")
        leader = cluster.start_leader(*arguments)
        cluster.start_relays(1)
        assert set(cluster.wait_for_end().values()) == {0}
        first_loss = leader.losses()[1]
    expected = transformers_loss(tmp_path / "theirs", microbatches(run, corpus, 1))
    print(f"{model_type}: {first_loss} {expected}")
    assert abs(first_loss - expected) < 1e-5
    assert leader.losses()[2] < first_loss
    assert_agreement(tmp_path / "ours")


def test_a_folder_of_another_model_is_refused(tmp_path: Path, corpus: Path) -> None:
    save_random_model(tmp_path / "theirs", "gpt2")
    cluster = Cluster(tmp_path / "cluster", make_run(), corpus)
    arguments = ("--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state")
    result = run_decod("leader", cluster.run_file, "--init", tmp_path / "theirs", *arguments)
    assert_refused(result, exit_code=9, holds=["E-DAT-017", str(tmp_path / "theirs")])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is dynamic"),
        ({"attention_dropout": 0.1}, "set attention_dropout to 0.0"),
        ({"max_position_embeddings": 64}, "model.max_position_embeddings = 64"),
    ],
)
def test_a_folder_that_can_not_be_trained_exactly_is_refused_before_anybody_is_asked_to_join(
    tmp_path: Path, corpus: Path, changes: dict[str, object], named: str
) -> None:
    save_random_model(tmp_path / "theirs", "llama")
    run = replace(make_run(), model=read_config(tmp_path / "theirs"))
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    cluster = Cluster(tmp_path / "cluster", run, corpus)
    arguments = ("--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state")
    result = run_decod("leader", cluster.run_file, "--init", tmp_path / "theirs", *arguments)
    assert_refused(result, exit_code=9, holds=[named])
    assert "join string" not in result.stdout


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, corpus: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", make_run(), corpus)
    arguments = ("--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state")
    result = run_decod("leader", cluster.run_file, "--init", tmp_path / "absent", *arguments)
    assert_refused(result, exit_code=9, holds=[str(tmp_path / "absent")])
