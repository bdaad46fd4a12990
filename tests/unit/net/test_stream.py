"""The hand-made frames are what protobuf itself would write and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.net.stream import data_frame, frame_data
from decod.wire.v1.state_pb2 import FetchResponse


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 2**20])
def test_a_frame_is_the_protobuf_message(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    frame = data_frame(memoryview(data))
    assert frame == FetchResponse(data=data).SerializeToString()
    assert frame_data(frame) == data


@given(st.binary(max_size=40))
def test_what_is_no_data_frame_is_malformed(frame: bytes) -> None:
    try:
        data = bytes(frame_data(frame))
    except MalformedMessageError:
        return
    assert FetchResponse.FromString(frame) == FetchResponse(data=data)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x12",
        b"\x12\x00",
        b"\x12\x05abc",
        b"\x12\x02abc",
        b"\x12" + b"\xff" * 12,
    ],
)
def test_truncated_overlong_and_foreign_frames_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        frame_data(frame)
