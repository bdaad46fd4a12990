"""Honest members whose processors have other instructions are found honest.

Their sums are rounded otherwise, so no two of them compute the same bits.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.model_config import ModelDtype
from decod.run.protocol_config import AuditConfig
from tests.support.cluster import DECOD, Cluster
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_ITERATIONS = 20

INSTRUCTIONS = {
    "DEFAULT": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
    "AVX512": ("avx512", "AVX512_CORE", "AVX512"),
}
"""What torch, oneDNN and MKL may use, by the name that torch gives it."""

_SPEAK = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def words_for(name: str) -> list[str]:
    """Return the beginning of a command line whose process has only these instructions."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    return ["env", *(f"{n}={v}" for n, v in zip(names, INSTRUCTIONS[name], strict=True))]


def has(name: str) -> bool:
    command = [*words_for(name), sys.executable, "-c", _SPEAK]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    return told.stdout.strip() == name


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_nobody_is_taken_for_a_liar(tmp_path: Path, corpus: Path, dtype: ModelDtype) -> None:
    if missing := [name for name in INSTRUCTIONS if not has(name)]:
        pytest.skip(f"this processor, or this torch, lacks {missing}")
    run = make_run(dtype=dtype, min_nodes_per_stage=3)
    run = replace(run, audits=AuditConfig(share=1.0, share_in_probation=1.0))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        for stage in ("1", "2"):
            for name in INSTRUCTIONS:
                program = (*words_for(name), *DECOD)
                cluster.start_relay(f"{name}-{stage}", "--stage", stage, program=program)
        cluster.wait_for_iteration(NUM_ITERATIONS)
        audits = leader.status()["audits"]
        assert audits["num_audited"] >= 6 * (NUM_ITERATIONS - 1)
        assert not audits["liars"]
        for event in ("relay.lied", "audit.disputed", "audit.unsettled", "relay.stands_out"):
            assert not leader.events(event)
        assert not leader.events("iteration.aborted"), "all vote for the same step"
        leader.end_run()
