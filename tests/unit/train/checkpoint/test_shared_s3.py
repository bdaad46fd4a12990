"""Checkpoints in S3, as a local server of moto plays it."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from decod.train.checkpoint.iteration_folders import StageBlob, stage_file
from decod.train.checkpoint.places import StoredFolder
from decod.train.checkpoint.shared import (
    SharedCheckpoints,
    SharedStoreError,
    UrlStore,
    find_stored,
    open_store,
    parse_folder,
)
from decod.train.checkpoint.store import find_problems, find_tensors, read_checkpoint
from tests.support.checkpoints import RUN_ID, random_blobs
from tests.unit.train.checkpoint.test_shared import write

_BUCKET = "decod-test"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[UrlStore]:
    """A store as an operator configures one: by the environment alone."""
    import fsspec.config
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    s3fs.S3FileSystem.clear_instance_cache()
    files: Any = s3fs.S3FileSystem()
    files.mkdir(_BUCKET)
    opened = open_store(f"s3://{_BUCKET}/run")
    assert isinstance(opened, UrlStore)
    yield opened
    files.invalidate_cache()
    files.rm(_BUCKET, recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_checkpoints_are_written_found_read_and_pruned(store: UrlStore) -> None:
    shared = SharedCheckpoints(store, RUN_ID)
    folders = [write(shared, iteration) for iteration in (1, 2, 3)]
    found = find_stored(store)
    assert [each.iteration for each in found] == [3, 2, 1]
    assert not any(find_problems(each) for each in found)
    unfinished = shared.new_folder(2)
    shared.write_stage(unfinished, 0, random_blobs()[0])
    shared.prune(2, folders[-1].name)
    assert sorted(store.names(RUN_ID)) == sorted(each.name for each in folders[1:])

    place = parse_folder(str(folders[-1]))
    assert isinstance(place, StoredFolder)
    checkpoint = read_checkpoint(place)
    for tensor in find_tensors(checkpoint).values():
        content = b"".join(tensor.pieces())
        assert hashlib.sha256(content).hexdigest() == tensor.entry.sha256


def test_a_part_that_is_given_up_leaves_no_object_and_no_upload(store: UrlStore) -> None:
    """It is large enough to have begun in several pieces."""
    shared, blob = SharedCheckpoints(store, RUN_ID), random_blobs(5)[1]
    folder = shared.new_folder(5)

    def content() -> Iterator[bytes]:
        for _ in range(30):
            yield bytes(4 << 20)
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="the disk has gone"):
        store.write(f"{RUN_ID}/{folder}/{stage_file(1)}", content())
    assert store.names(f"{RUN_ID}/{folder}") == []
    uploads = store._files.call_s3("list_multipart_uploads", Bucket=_BUCKET)
    assert not uploads.get("Uploads")
    shared.write_stage(folder, 1, StageBlob(blob.entries, blob.data))
    assert store.names(f"{RUN_ID}/{folder}") == [stage_file(1)]


def test_a_missing_bucket_is_told_in_one_line(store: UrlStore) -> None:
    shared = SharedCheckpoints(open_store("s3://decod-nowhere/run"), RUN_ID)
    with pytest.raises(SharedStoreError, match="E-CKP-021") as failed:
        shared.write_stage(shared.new_folder(1), 1, random_blobs()[1])
    assert "\n" not in str(failed.value)
    assert "bucket" in str(failed.value)
    assert not store._files.exists("decod-nowhere"), "a slip of the pen makes no bucket"


def test_wrong_credentials_are_told_in_one_line(
    store: UrlStore, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request is signed. Here a client of the store has nothing to sign with."""
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", json.dumps("/nonexistent"))
    s3fs.S3FileSystem.clear_instance_cache()
    poor = SharedCheckpoints(open_store(f"s3://{_BUCKET}/run"), RUN_ID)
    with pytest.raises(SharedStoreError, match="E-CKP-021") as failed:
        poor.write_stage(poor.new_folder(1), 1, random_blobs()[1])
    assert "redentials" in str(failed.value)
    assert "\n" not in str(failed.value)
