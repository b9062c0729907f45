"""The attention calls of both clients: what they send, what they refuse, and what they make of the answer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion.client import PionClient, attention, errors
from pion.client.requests import Either, Request
from pion.client.sinks import FreshArrays

from .binary_fakes import Got, both_lanes, frame, reply_with
from .fakes import FakeServer, Peer, array, bulk, requests


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


Q = floats(4, 3, 8)
ONE = floats(4, 1, 8)
K, V = floats(2, 5, 8, seed=2), floats(2, 5, 8, seed=3)
MAP = [0, 0, 1, 1]
MAP_BYTES = struct.pack("<4I", *MAP)
INDICES = np.array([[0, 1], [2, 3], [4, 0], [1, 2]])
COUNTS = (2, 1, 2, 1)
EMPTY = np.empty((2, 0, 8), np.float32)

#: what is asked, command, numbers in RESP order, numbers in binary order, arrays, shape of the answer
FORMS: dict[str, tuple[Callable[[], Any], str, int, list[int], list[bytes], tuple[int, ...]]] = {
    "query": (
        lambda: attention.query("s", 7, Q, 9, 0),
        "ATTEND.PREFIX.QUERY",
        0x22,
        [4, 8, 9],
        [Q.tobytes()],
        (4, 3, 8),
    ),
    "fused": (
        lambda: attention.query_fused("s", 7, Q, K, V, MAP, 0),
        "ATTEND.PREFIX.QUERY_FUSED",
        0x24,
        [4, 8, 5, 2],
        [Q.tobytes(), K.tobytes(), V.tobytes(), MAP_BYTES],
        (4, 3, 8),
    ),
    "fused, no suffix": (
        lambda: attention.query_fused("s", 7, Q, EMPTY, EMPTY, MAP, 0),
        "ATTEND.PREFIX.QUERY_FUSED",
        0x24,
        [4, 8, 0, 2],
        [Q.tobytes(), b"", b"", MAP_BYTES],
        (4, 3, 8),
    ),
    "sparse": (
        lambda: attention.query_sparse("s", 7, ONE, INDICES, COUNTS, 0),
        "ATTEND.PREFIX.QUERY_SPARSE",
        0x25,
        [4, 8, 2],
        [ONE.tobytes(), struct.pack("<8I", *INDICES.flat), struct.pack("<4I", *COUNTS)],
        (4, 1, 8),
    ),
    "auto": (
        lambda: attention.query_sparse_auto("s", 7, ONE, MAP, 16, 3, 2, 0),
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        0x26,
        [4, 8, 16, 3, 2],
        [ONE.tobytes(), MAP_BYTES],
        (4, 1, 8),
    ),
    "auto fused": (
        lambda: attention.query_sparse_auto_fused("s", 7, ONE, K, V, MAP, 16, 3, 0),
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
        0x27,
        [4, 8, 16, 3, 2, 5],
        [ONE.tobytes(), K.tobytes(), V.tobytes(), MAP_BYTES],
        (4, 1, 8),
    ),
}


def resp_arguments(request: Request[Any]) -> list[bytes]:
    """The arguments in the bytes of a RESP command."""
    data = b"".join(map(bytes, request.buffers))
    found = []
    at = data.index(b"\r\n") + 2
    for _ in range(int(data[1 : at - 2])):
        end = data.index(b"\r\n", at)
        size = int(data[at + 1 : end])
        found.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    assert at == len(data)
    return found


def binary_parts(request: Either[Any]) -> tuple[int, bytes, bytes]:
    """(command, meta, body) in the bytes of a binary request."""
    data = b"".join(map(bytes, request.over_binary(1).buffers))
    meta_bytes, body_bytes = struct.unpack_from("<IQ", data, 12)
    assert len(data) == 24 + meta_bytes + body_bytes
    return data[3], data[24 : 24 + meta_bytes], data[24 + meta_bytes :]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_query_sends(form: str) -> None:
    make, command, code, values, arrays, _ = FORMS[form]
    request = make()
    assert resp_arguments(request.over_resp()) == [command.encode(), b"s", b"7", *(b"%d" % v for v in values), *arrays]
    meta = b"\1\0s" + struct.pack(f"<{len(values) + 2}I", 7, *values, 0)
    assert binary_parts(request) == (code, meta, b"".join(arrays))
    assert request.reads


def test_a_window_comes_last_on_both_lanes() -> None:
    request = attention.query("s", 7, Q, 0, 300)
    assert resp_arguments(request.over_resp())[-1] == b"300"
    assert binary_parts(request)[1].endswith(struct.pack("<II", 0, 300))


def test_what_a_store_sends() -> None:
    request = attention.store("s", 7, K, V)
    assert resp_arguments(request.over_resp()) == [
        *(b"ATTEND.PREFIX.STORE", b"s", b"7", b"2", b"5", b"8"),
        *(K.tobytes(), V.tobytes()),
    ]
    assert binary_parts(request) == (0x20, b"\1\0s" + struct.pack("<4I", 7, 2, 5, 8), K.tobytes() + V.tobytes())
    assert not request.reads


def test_large_arrays_are_sent_as_they_lie() -> None:
    keys = floats(2, 1000, 8)
    request = attention.store("s", 0, keys, keys)
    for buffers in (request.over_resp().buffers, request.over_binary(1).buffers):
        shared = [part for part in buffers if np.shares_memory(np.frombuffer(part, np.uint8), keys)]
        assert len(shared) == 2


def answer(request: Either[Any], values: np.ndarray) -> Any:
    """What the request makes of these values as its answer."""
    sink = FreshArrays()
    sink.receive(0, values.nbytes)[:] = values.tobytes()
    return request.convert(sink.done(0))


@pytest.mark.parametrize("form", FORMS)
def test_what_an_answer_becomes(form: str) -> None:
    make, *_, shape = FORMS[form]
    lse = 12 if form == "query" else 0
    values = floats(int(np.prod(shape)) + lse)
    result = answer(make(), values)
    assert (result.shape, result.dtype) == (shape, np.float32)
    assert result.tobytes() == values[: values.size - lse].tobytes()
    for size in (values.size - 1, values.size + 1, 0, values.size - lse if lse else values.size + 12):
        with pytest.raises(errors.BadReplyError, match="bytes"):
            answer(make(), floats(size))


def test_an_answer_with_its_lse() -> None:
    values = floats(4 * 3 * 9)
    output, lse = answer(attention.query_with_lse("s", 7, Q, 0, 0), values)
    assert (output.shape, lse.shape) == ((4, 3, 8), (4, 3))
    assert output.tobytes() + lse.tobytes() == values.tobytes()


def test_the_lse_of_one_query_is_that_of_the_same_query_asked_twice() -> None:
    request = attention.query_with_lse("s", 7, ONE, 0, 0)
    assert binary_parts(request)[2] == np.repeat(ONE, 2, axis=1).tobytes()
    both = floats(4, 2, 8), floats(4, 2)
    output, lse = answer(request, np.concatenate([each.reshape(-1) for each in both]))
    assert np.array_equal(output, both[0][:, :1])
    assert np.array_equal(lse, both[1][:, :1])


def test_one_query_has_no_lse_to_leave_out() -> None:
    assert answer(attention.query("s", 7, ONE, 0, 0), floats(32)).shape == (4, 1, 8)


WRONG: list[tuple[str, Callable[[PionClient], object]]] = [
    ("q", lambda c: c.attend_query("s", 0, Q.astype(np.float64))),
    ("q", lambda c: c.attend_query("s", 0, Q.astype(">f4"))),
    ("q", lambda c: c.attend_query("s", 0, Q.transpose(1, 0, 2))),
    ("q", lambda c: c.attend_query("s", 0, Q[0])),
    ("q", lambda c: c.attend_query("s", 0, Q.tolist())),
    ("q", lambda c: c.attend_query("s", 0, Q[:, :0])),
    ("q", lambda c: c.attend_query("s", 0, Q[:0])),
    ("q", lambda c: c.attend_query_sparse("s", 0, Q, INDICES, COUNTS)),
    ("q", lambda c: c.attend_query_sparse_auto("s", 0, Q, MAP, block=1, top=1, kv_heads=2)),
    ("q", lambda c: c.attend_query_sparse_auto_fused("s", 0, Q, K, V, MAP, block=1, top=1)),
    ("keys", lambda c: c.attend_store("s", 0, K[:, :0], V[:, :0])),
    ("keys", lambda c: c.attend_store("s", 0, K.astype(np.float16), V)),
    ("values", lambda c: c.attend_store("s", 0, K, V[:, :4].copy())),
    ("values", lambda c: c.attend_store("s", 0, K, V[:, ::2])),
    ("keys", lambda c: c.attend_query_fused("s", 0, Q, floats(2, 5, 16), V, MAP)),
    ("values", lambda c: c.attend_query_fused("s", 0, Q, K, EMPTY, MAP)),
    ("head_map", lambda c: c.attend_query_fused("s", 0, Q, K, V, MAP[:3])),
    ("head_map", lambda c: c.attend_query_fused("s", 0, Q, K, V, [0.0, 0.0, 1.0, 1.0])),
    ("head_map", lambda c: c.attend_query_fused("s", 0, Q, K, V, [0, 0, 1, -1])),
    ("head_map", lambda c: c.attend_query_fused("s", 0, Q, K, V, [0, 0, 1, 2**32])),
    ("indices", lambda c: c.attend_query_sparse("s", 0, ONE, INDICES[:3], COUNTS)),
    ("indices", lambda c: c.attend_query_sparse("s", 0, ONE, INDICES[:, :0], COUNTS)),
    ("indices", lambda c: c.attend_query_sparse("s", 0, ONE, INDICES[0], COUNTS)),
    ("indices", lambda c: c.attend_query_sparse("s", 0, ONE, INDICES.astype(np.float32), COUNTS)),
    ("counts", lambda c: c.attend_query_sparse("s", 0, ONE, INDICES, COUNTS[:3])),
]


@pytest.mark.parametrize(("name", "call"), WRONG)
def test_an_argument_that_does_not_fit_is_named_before_anything_is_sent(
    name: str, call: Callable[[PionClient], object]
) -> None:
    """Nobody listens on the port: a request that was sent would be another error."""
    with pytest.raises(ValueError, match=rf"^{name} must "):
        call(PionClient(port=1, retries=0))


def test_indices_may_be_any_integers() -> None:
    for kind in (np.int8, np.uint8, np.int64, np.uint32):
        request = attention.query_sparse("s", 7, ONE, INDICES.astype(kind), np.array(COUNTS, kind), 0)
        assert binary_parts(request)[2].endswith(struct.pack("<12I", *INDICES.flat, *COUNTS))
    turned = attention.query_sparse("s", 7, ONE, np.asfortranarray(INDICES), COUNTS, 0)
    assert binary_parts(turned)[2][128:160] == struct.pack("<8I", *INDICES.flat)


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention.query("s", -1, Q, 0, 0),
        lambda: attention.query("s", 0, Q, -1, 0),
        lambda: attention.query("s", 0, Q, 0, -1),
        lambda: attention.query_sparse_auto("s", 0, ONE, MAP, -1, 1, 1, 0),
    ],
)
def test_a_negative_number_is_for_the_server_to_refuse_in_words(make: Callable[[], object]) -> None:
    request = make()
    assert isinstance(request, Request)
    assert b"-1" in resp_arguments(request)


# Answers that are words


@pytest.mark.parametrize(
    ("status", "word", "state"), [(0, b"HIT", "warm"), (3, b"COLD", "cold"), (2, b"MISS", "missing")]
)
def test_lookup(status: int, word: bytes, state: str) -> None:
    make = reply_with(lambda got: frame(got.code, got.number, status))
    with both_lanes(make, resp=lambda request: b"+%s\r\n" % word) as server:
        for lane in ("binary", "resp"):
            with PionClient(port=server.port, lane=lane) as client:
                assert client.attend_lookup("s", 1) == state
        assert server.over_resp == [b"INFO", b"ATTEND.PREFIX.LOOKUP"]


def test_a_lookup_that_is_answered_with_something_else() -> None:
    with (
        replying(b"+MAYBE\r\n") as server,
        PionClient(port=server.port, lane="resp") as client,
        pytest.raises(errors.BadReplyError, match="COLD"),
    ):
        client.attend_lookup("s", 1)


def test_a_cold_layer_is_the_same_error_on_both_lanes() -> None:
    text = b"COLDMISS layer 1 is cold"
    make = reply_with(lambda got: frame(got.code, got.number, 3, body=text))
    with both_lanes(make, resp=lambda request: b"-%s\r\n" % text) as server:
        for lane in ("binary", "resp"):
            with (
                PionClient(port=server.port, lane=lane) as client,
                pytest.raises(errors.ColdMissError, match="layer 1") as caught,
            ):
                client.attend_query("s", 1, Q)
            assert caught.value.code == "COLDMISS"


def test_a_query_is_repeated_when_the_connection_was_lost_and_a_store_is_not() -> None:
    tries: list[Got] = []

    def script(peer: Peer) -> None:
        def make(got: Got) -> bytes:
            tries.append(got)
            if len(tries) == 1 or got.code == 0x20:
                raise EOFError
            return frame(got.code, got.number, body=bytes(4 * 4 * 3 * 9))

        reply_with(make)(peer)

    with both_lanes(script) as server, PionClient(port=server.port) as client:
        assert client.attend_query("s", 0, Q).shape == (4, 3, 8)
        assert len(tries) == 2
        with pytest.raises(errors.OutcomeUnknownError, match=r"ATTEND\.PREFIX\.STORE"):
            client.attend_store("s", 0, K, V)
        assert len(tries) == 3


def replying(reply: bytes) -> FakeServer:
    seen: list[list[bytes]] = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request)
            peer.send(reply)

    server = FakeServer(script)
    server.seen = seen
    return server


@pytest.mark.parametrize(
    ("reply", "result"), [(b"+16\r\n", (16, 0)), (b"+0 skipped_dim=3\r\n", (0, 3)), (b"+12 skipped_dim=4\r\n", (12, 4))]
)
def test_warm(reply: bytes, result: tuple[int, int]) -> None:
    with replying(reply) as server, PionClient(port=server.port) as client:
        assert client.prefix_warm("ns", 8, 64) == result
        assert client.prefix_warm("ns", 8, 64, sid="other") == result
    assert server.seen == [
        [b"KV.PREFIX.WARM", b"ns", b"8", b"64"],
        [b"KV.PREFIX.WARM", b"ns", b"8", b"64", b"other"],
    ]


@pytest.mark.parametrize("reply", [b"+OK\r\n", b"+1 skipped=3\r\n", b"+1 skipped_dim=\r\n", b":4\r\n", b"+-1\r\n"])
def test_warm_answered_with_something_else(reply: bytes) -> None:
    with replying(reply) as server, PionClient(port=server.port) as client:
        with pytest.raises(errors.OutcomeUnknownError) as caught:
            client.prefix_warm("ns", 8, 64)
        assert isinstance(caught.value.__cause__, errors.BadReplyError)


def test_drop_and_info() -> None:
    with replying(b":3\r\n") as server, PionClient(port=server.port) as client:
        assert client.attend_drop("s") == 3
        assert client.attend_drop("s", 0) == 3
    assert server.seen == [[b"ATTEND.PREFIX.DROP", b"s"], [b"ATTEND.PREFIX.DROP", b"s", b"0"]]
    with (
        replying(b"%2\r\n$6\r\ndevice\r\n$3\r\ncpu\r\n+warm\r\n:7\r\n") as server,
        PionClient(port=server.port) as client,
    ):
        assert client.attend_info() == {"device": "cpu", "warm": 7}
    with (
        replying(array(bulk(b"x"))) as server,
        PionClient(port=server.port) as client,
        pytest.raises(errors.BadReplyError),
    ):
        client.attend_info()
