"""Weights that a run does not train come from the Hub, as far as a host needs them."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from decod.config.schema import Carried, Manifest
from decod.daemon import hub_base
from decod.daemon.hub_base import HubBase, hub_model_of
from decod.ids import NodeId
from decod.model.weights import INDEX_FILE, WEIGHTS_FILE, data_start
from decod.train.checkpoint.base import ArrivingPart, BaseSource, base_hashes
from decod.train.checkpoint.places import DiskRoom
from tests.support.hub_server import TOKEN, HubServer, asked_hub
from tests.unit.train.checkpoint.test_base import MODEL, RUN
from tests.unit.train.test_executor_adapter import folder_of

NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_base, "_BEGINNING_BYTES", 64)
    monkeypatch.setattr(hub_base, "_PAUSE_S", 0.0)
    with asked_hub(tmp_path / "home", monkeypatch) as server:
        yield server


def divided(folder: Path) -> Path:
    """Divide the weights of a folder over two files and an index, as large models have them."""
    weights = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    places = {}
    for index in range(2):
        file = f"model-{index + 1:05}-of-00002.safetensors"
        part = dict([*sorted(weights.items())][index::2])
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


class Host:
    """A host that holds nothing, and asks the Hub and then members."""

    def __init__(self, hub: HubServer, folder: Path, cache: Path, **changes: Any) -> None:
        self.commit = hub.add(NAME, folder)
        hashes = base_hashes(changes.pop("of", folder), MODEL)
        self.source = BaseSource(hashes, cache, **changes)
        self.taken_bytes = 0
        self.members_asked: list[str] = []
        self.notes: list[dict[str, Any]] = []
        base = HubBase(NAME, self.commit, MODEL, self.source, self._take)
        self._fetch = base.before(self._ask_members, self._note)

    def _take(self, num_bytes: int) -> None:
        self.taken_bytes += num_bytes

    async def _ask_members(self, sha256: str, _: Sequence[NodeId], __: ArrivingPart) -> None:
        self.members_asked.append(sha256)

    def _note(self, event: str, **facts: Any) -> None:
        self.notes.append({"event": event} | facts)

    async def fetch(self, part: int) -> None:
        arriving = self.source.arriving(MODEL, part)
        try:
            await self._fetch(self.source.hashes[part], (), arriving)
            if not self.members_asked:
                arriving.keep()
        finally:
            arriving.close()


@pytest.mark.parametrize("in_two_files", [False, True])
async def test_a_host_takes_the_ranges_of_its_parts_alone(
    hub: HubServer, tmp_path: Path, in_two_files: bool
) -> None:
    folder = folder_of(tmp_path / "model", MODEL)
    if in_two_files:
        divided(folder)
    host = Host(hub, folder, tmp_path / "state")
    for part in (1, 3):
        await host.fetch(part)
        found = host.source.find(MODEL, part)
        given = replace(host.source, folder=folder).find(MODEL, part)
        assert found is not None
        assert given is not None
        assert found.description.text == given.description.text
    files = [*folder.glob("*.safetensors")]
    held_bytes = sum(
        entry.num_bytes
        for part in (1, 3)
        if (found := host.source.find(MODEL, part))
        for entry in found.description.entries
    )
    described_bytes = sum(map(data_start, files))
    if in_two_files:
        described_bytes += (folder / INDEX_FILE).stat().st_size
    # The folder's dtype is the run's, so what is held has come.
    assert sum(hub.given_bytes.values()) == host.taken_bytes == held_bytes + described_bytes
    assert host.taken_bytes < sum(path.stat().st_size for path in files)
    assert (host.members_asked, host.notes) == ([], [])
    left = (tmp_path / "state/base").rglob("*.safetensors")
    assert all(path.stat().st_blocks * 512 <= 16384 for path in left), "only beginnings are left"


async def test_a_broken_connection_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    host = Host(hub, folder_of(tmp_path / "model", MODEL), tmp_path / "state")
    await host.fetch(1)
    hub.breaks[WEIGHTS_FILE] = [1000, 0, 0, 500]
    before = len(hub.ranges)
    await host.fetch(2)
    assert host.source.find(MODEL, 2) is not None
    starts = [start - hub.ranges[before][1] for _, start in hub.ranges[before:]]
    assert starts == [0, 1000, 1000, 1000, 1500]
    assert host.notes == []


@pytest.mark.parametrize(
    "what", ["gone", "gated", "another model", "altered", "no room", "too much", "odd", "slow"]
)
async def test_members_are_asked_for_what_the_hub_does_not_give(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = folder_of(tmp_path / "model", MODEL)
    other = folder_of(tmp_path / "other", MODEL, seed=10)
    state = tmp_path / "state"
    room = DiskRoom(state, 100) if what == "no room" else None
    if what == "another model":
        host = Host(hub, other, state, of=folder)
        reason = "are not those that the run adapts"
    else:
        host = Host(hub, folder, state, room=room)
        reason = "the disk" if what == "no room" else "the Hub does not give someone/tiny"
    if what == "gone":
        hub.status = 503
        reason += ".* 503"
    elif what == "gated":
        monkeypatch.delenv("HF_TOKEN")
        hub.repositories[NAME].is_gated = True
        reason += ".* 401"
    elif what == "odd":
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, **__: 3)
        reason = r"can't read \(TypeError\)"
    elif what == "slow":
        monkeypatch.setattr(hub_base, "_DESCRIBING_MAX_S", 0.0)
        reason = "too slow"
    elif what == "too much":
        monkeypatch.setattr(hub_base, "_DESCRIBED_MAX_BYTES", 100)
        reason = "are no model's"
    elif what == "altered":
        hub.altered[WEIGHTS_FILE] = (other / WEIGHTS_FILE).read_bytes()
        reason = "are not those that the run adapts"
    for part in (1, 2):
        await host.fetch(part)
    assert host.members_asked == [*host.source.hashes[1:3]]
    (note,) = host.notes
    assert note["event"] == "base.hub_failed"
    assert re.search(reason, note["reason"]), note
    assert TOKEN not in str(note)
    assert not [*state.rglob("*.safetensors")]
    assert host.source.find(MODEL, 1) is None


async def test_a_node_that_leaves_does_not_wait_for_the_hub(hub: HubServer, tmp_path: Path) -> None:
    host = Host(hub, folder_of(tmp_path / "model", MODEL), tmp_path / "state")
    begun, go_on, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def take(num_bytes: int) -> None:
        waiting = asyncio.run_coroutine_threadsafe(go_on.wait(), loop)
        loop.call_soon_threadsafe(begun.set)
        waiting.result()
        host.taken_bytes += num_bytes
        loop.call_soon_threadsafe(over.set)

    base = HubBase(NAME, host.commit, MODEL, host.source, take)
    arriving = host.source.arriving(MODEL, 1)
    fetch = base.before(host._ask_members, host._note)
    fetching = asyncio.create_task(fetch(host.source.hashes[1], (), arriving))
    await begun.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    go_on.set()
    await over.wait()
    assert host.source.find(MODEL, 1) is None
    assert len(hub.ranges) == 1


@pytest.mark.parametrize(
    ("base_model", "offline", "expected"),
    [
        (f"{NAME}@{'a' * 40}", False, (NAME, "a" * 40)),
        (f"{NAME}@{'a' * 40}", True, None),
        (NAME, False, None),
        ("tiny", False, None),
        ("", False, None),
    ],
)
def test_the_manifest_names_the_model(
    monkeypatch: pytest.MonkeyPatch,
    base_model: str,
    offline: bool,
    expected: tuple[str, str] | None,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    manifest = Manifest(
        run=RUN,
        data_index_sha256="0" * 64,
        data_vocab_size=MODEL.vocab_size,
        carried=Carried(base_model=base_model).to_text(),
        base="0" * 64 * RUN.num_base_parts,
    )
    assert hub_model_of(manifest) == expected
