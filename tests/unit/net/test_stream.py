"""The hand-made frames are what protobuf itself would write and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.net.stream import data_frame, frame_data, split_head
from decod.wire.v1.state_pb2 import FetchResponse
from decod.wire.v1.tensor_pb2 import PushRequest, TensorHeader


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 2**20])
def test_a_frame_is_the_protobuf_message(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    frame = data_frame(memoryview(data))
    assert frame == PushRequest(data=data).SerializeToString()
    assert frame == FetchResponse(data=data).SerializeToString()
    assert frame_data(frame) == data


@given(st.binary(max_size=40))
def test_what_is_no_data_frame_is_malformed(frame: bytes) -> None:
    try:
        data = bytes(frame_data(frame))
    except MalformedMessageError:
        return
    assert PushRequest.FromString(frame) == PushRequest(data=data)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x12",
        b"\x12\x00",
        b"\x12\x05abc",
        b"\x12\x02abc",
        b"\x12" + b"\xff" * 12,
        PushRequest(header=TensorHeader(size_bytes=1)).SerializeToString(),
    ],
)
def test_truncated_overlong_and_foreign_frames_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        frame_data(frame)


def test_a_header_and_a_frame_in_a_row_are_one_message() -> None:
    """Small tensors travel like this."""
    header = PushRequest(header=TensorHeader(size_bytes=3))
    both = header.SerializeToString() + data_frame(memoryview(b"abc"))
    assert PushRequest.FromString(both) == PushRequest(header=header.header, data=b"abc")
    assert header.SerializeToString() + data_frame(memoryview(b"")) != b""


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=300))
def test_head_and_data_of_one_message_come_apart_again(envelope: bytes, data: bytes) -> None:
    """The header is parsed alone, so that the megabyte behind it is not copied for it."""
    header = TensorHeader(size_bytes=len(data), crc32=len(envelope))
    head = PushRequest(header=header).SerializeToString()
    whole = data_frame(memoryview(data), head=head)
    assert split_head(whole) == (header.SerializeToString(), data)
    assert split_head(head) == (header.SerializeToString(), b"")
    assert PushRequest.FromString(whole).data == data


@given(st.binary(max_size=300))
def test_any_other_layout_is_malformed(frame: bytes) -> None:
    try:
        header, data = split_head(frame)
    except MalformedMessageError:
        return
    assert PushRequest.FromString(frame).data == data
    assert TensorHeader.FromString(header) == PushRequest.FromString(frame).header
