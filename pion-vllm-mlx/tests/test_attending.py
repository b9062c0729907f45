"""What `Attending` asks, and in which order: against a model of a server that others change between two commands."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pion.client.errors import (
    ColdMissError,
    ConnectFailedError,
    ConnectionLostError,
    NotAuthenticatedError,
    PermissionDeniedError,
    ServerError,
    WrongPasswordError,
)
from pion.commands.attend_arguments import check_head_dim
from pion.commands.attend_common import NOT_FOUND as SERVER_TEXT
from pion.errors import CommandError
from pion_vllm_mlx import UnsupportedAttentionError, attending
from pion_vllm_mlx.attending import NOT_FOUND, Attending, Target, attention_session, check_width, uniform_heads
from pion_vllm_mlx.prefix_key import Context, Layout, token_ids
from pion_vllm_mlx.slots import Side, SlotShape

NAME = "one's own"
LAYERS = 3


def slots(heads=2, head_dim=16):
    return (SlotShape("KVCache", "fp32", Side(heads, head_dim), Side(heads, head_dim)),) * LAYERS


CONTEXT = Context(b"digest", slots(), Layout(("fp32",) * LAYERS, ("fp32",) * LAYERS))
X, Y = (CONTEXT.meta(token_ids(ids), "") for ids in ([1, 2, 3], [4, 5, 6]))
STRICT = CONTEXT.namespace(token_ids([1, 2, 3]))


class Server:
    """Prefixes and sessions as docs/how-to/attend.md describes them; what a layer holds is the META of its prefix.

    `script` says what others do between two steps of the server, one entry for each.
    """

    def __init__(self, script=(), others=()):
        self.prefixes = {}
        self.sessions = {}
        self.sources = {}
        self.warming = []
        self.commands = []
        self.script = list(script)
        self.others = list(others)

    def store(self, name, meta):
        self.drop(name)
        self.prefixes[name] = meta

    def drop(self, name):
        self.prefixes.pop(name, None)
        for session in [session for session, source in self.sources.items() if source == name]:
            self.forget(session)
        for each in self.warming:
            each["dropped"] |= each["name"] == name

    def forget(self, session):
        self.sources.pop(session, None)
        return len(self.sessions.pop(session, ()))

    def step(self):
        action = self.script.pop(0) if self.script else None
        if action in (X, Y):
            self.store(NAME, action)
        elif action == "drop":
            self.drop(NAME)
        elif action == "evict":
            self.prefixes.pop(NAME, None)
        elif action == "restart":
            self.sessions, self.sources = {}, {}
        elif action == "cool":
            self.sessions = {name: dict.fromkeys(layers) for name, layers in self.sessions.items()}
        elif action == "cool the last":
            for layers in self.sessions.values():
                layers[LAYERS - 1] = None
        elif action is not None and self.others:
            other = self.others.pop()  # not one that is in the middle of something
            generate(self, other, action[1])
            self.others.append(other)


class Client:
    """As much of PionClient as `Attending` uses, on a `Server`."""

    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        def command(*args, **options):
            self.server.step()
            self.server.commands.append(name)
            answer = getattr(self, f"do_{name}")(*args, **options)
            self.server.step()
            return answer

        return command

    def do_prefix_meta(self, name):
        return self.server.prefixes.get(name)

    def do_prefix_chain(self, name):
        return [name] if name in self.server.prefixes else None

    def do_prefix_warm(self, name, _heads, _head_dim, sid):
        meta = self.server.prefixes.get(name)
        if meta is None:
            raise ServerError("no rows")
        warming = {"name": name, "dropped": False}
        self.server.warming.append(warming)
        for layer in range(LAYERS):
            self.server.step()
            if warming["dropped"]:
                raise ServerError("it was dropped meanwhile")
            self.server.sessions.setdefault(sid, {})[layer] = meta
            self.server.sources[sid] = name
        return LAYERS, 0

    def do_attend_lookup(self, sid, layer):
        layers = self.server.sessions.get(sid, {})
        return "missing" if layer not in layers else "cold" if layers[layer] is None else "warm"

    def do_attend_drop(self, sid):
        return self.server.forget(sid)

    def do_query(self, sid, layer):
        state = self.do_attend_lookup(sid, layer)
        if state == "missing":
            raise ServerError(SERVER_TEXT)
        if state == "cold":
            raise ColdMissError("the layer is cold", "COLDMISS")
        return self.server.sessions[sid][layer]


class Operation:
    """One with fallback."""

    def __init__(self, client):
        self.client = client

    def ask(self, _what, question, otherwise):
        try:
            return question(self.client)
        except ServerError:
            return otherwise


def generate(server, attending_, meta, name=NAME, *, strict=False):
    """A pass over a prefix with this META: what the layers were answered from; None where there was no answer."""
    target = Target(name, CONTEXT, strict, meta)
    operation = Operation(Client(server))
    attending_.make_warm(operation, target)
    answers = [
        attending_.ask(operation, target, lambda client, session, layer=layer: client.query(session, layer))
        for layer in range(LAYERS)
    ]
    assert set(answers) <= {meta, None}
    return answers


# Rows of the right prefix, or none

ACTIONS = st.sampled_from(
    [None, X, Y, "drop", "evict", "restart", "cool", "cool the last", ("generate", X), ("generate", Y)]
)


@settings(deadline=None, max_examples=800)
@given(st.lists(ACTIONS, max_size=60), st.sampled_from([X, Y]))
@example(["restart", None, None, None, Y], X)  # between META and WARM
@example(["restart", None, None, None, Y, None, None, None, X], X)  # and back behind WARM
@example([None] * 5 + [Y, ("generate", Y)], X)  # between two layers
def test_no_layer_is_answered_from_another_prefix(script, meta):
    """Whatever others do, and several processes that warm and attend at once; `generate` asserts it of each pass."""
    server = Server(others=[Attending(), Attending()])
    server.store(NAME, X)
    mine = Attending()
    assert generate(server, mine, X) == [X] * LAYERS
    server.script = script
    generate(server, mine, meta)
    server.script = []
    server.store(NAME, meta)
    assert generate(server, mine, meta) == [meta] * LAYERS


@given(st.lists(st.sampled_from([None, "evict", "restart", "cool", "cool the last"]), max_size=40))
def test_a_strict_name_keeps_one_session_for_all(script):
    server = Server()
    server.store(STRICT, X)
    one, two = Attending(), Attending()
    assert generate(server, one, X, STRICT, strict=True) == [X] * LAYERS
    warmed = server.commands.count("prefix_warm")
    assert generate(server, two, X, STRICT, strict=True) == [X] * LAYERS
    assert server.commands.count("prefix_warm") == warmed == 1
    server.script = script
    generate(server, two, X, STRICT, strict=True)
    assert set(server.sessions) <= {attention_session(STRICT)}


def test_cold_and_missing_layers_are_warmed_once_and_the_old_session_is_given_back():
    for action in ("cool", "restart", "cool the last"):
        server, mine = Server(), Attending()
        server.store(NAME, X)
        assert generate(server, mine, X) == [X] * LAYERS
        (first,) = server.sessions
        target, operation = Target(NAME, CONTEXT, meta=X), Operation(Client(server))
        server.script = [action]
        answer = mine.ask(operation, target, lambda client, session: client.query(session, LAYERS - 1))
        assert answer == X
        assert mine.rehydrates == 1
        (second,) = server.sessions
        assert first != second
        assert {each.startswith(attention_session(NAME) + "|") for each in (first, second)} == {True}


def test_a_prefix_that_is_warm_is_not_warmed_again_and_a_new_one_is():
    server, mine = Server(), Attending()
    server.store(NAME, X)
    for _ in range(3):
        assert generate(server, mine, X) == [X] * LAYERS
    assert server.commands.count("prefix_warm") == 1
    server.store(NAME, Y)
    assert generate(server, mine, X) == [None] * LAYERS
    assert server.commands.count("prefix_warm") == 1  # its META says enough
    assert generate(server, mine, Y) == [Y] * LAYERS
    assert server.commands.count("prefix_warm") == 2
    assert len(server.sessions) == 1
    assert not mine.make_warm(Operation(Client(server)), Target(NAME, CONTEXT, meta=X))


def test_a_session_that_turns_out_to_be_of_another_prefix_is_dropped():
    server, mine = Server([None, None, Y]), Attending()  # between META and WARM
    server.store(NAME, X)
    operation = Operation(Client(server))
    assert not mine.make_warm(operation, Target(NAME, CONTEXT, meta=X))
    assert server.commands == ["prefix_meta", "prefix_warm", "prefix_meta", "attend_drop"]
    assert server.sessions == {}


def test_names_whose_sessions_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(attending, "KNOWN_SESSIONS", 2)
    server, mine = Server(), Attending()
    for name in ("a", "b", "c", "b", "c", "a"):
        server.prefixes[name] = X
        assert generate(server, mine, X, name) == [X] * LAYERS
    assert server.commands.count("prefix_warm") == 4
    assert mine.is_warm(Client(server), "a", CONTEXT.slots)
    assert not mine.is_warm(Client(server), "b", CONTEXT.slots)  # forgotten


def test_threads_that_find_it_cold_together_warm_it_once():
    server, mine = Server(), Attending()
    server.store(NAME, X)
    generate(server, mine, X)
    server.sessions = {}
    count, answers, entered, lock = 4, [], [], threading.Lock()
    found_cold = threading.Barrier(count)

    class WithAll:
        """The lock around warming, entered once all threads want to."""

        def __enter__(self):
            found_cold.wait(30)
            entered.append(lock.acquire())

        def __exit__(self, *exc):
            lock.release()

    mine._places[NAME].lock = WithAll()

    def work():
        target = Target(NAME, CONTEXT, meta=X)
        answers.append(mine.ask(Operation(Client(server)), target, lambda client, session: client.query(session, 0)))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [X] * count
    assert server.commands.count("prefix_warm") == 2
    assert mine.rehydrates == count
    assert entered == [True] * count


# Questions about whatever a name stands for


def test_a_question_without_a_meta_is_about_what_the_name_stands_for():
    server, mine = Server(), Attending()
    operation = Operation(Client(server))
    for meta in (X, Y, X):
        server.store(NAME, meta)
        for _ in range(2):
            assert mine.ask(operation, Target(NAME, CONTEXT), lambda client, session: client.query(session, 1)) == meta
    assert server.commands.count("prefix_warm") == 3
    server.store(STRICT, X)
    assert mine.ask(operation, Target(STRICT, CONTEXT), lambda client, session: client.query(session, 1)) == X
    assert attention_session(STRICT) in server.sessions  # found to be strict: shared with others


# Which errors mean that it must be warmed


@pytest.mark.parametrize(
    ("error", "warms"),
    [
        (NOT_FOUND, True),
        (ServerError(SERVER_TEXT), True),
        (ColdMissError("layer 0 is cold", "COLDMISS"), True),
        (ServerError("the key of row 3 was not found"), False),
        (ServerError("session not found: use another"), False),
        (ServerError(SERVER_TEXT, "BUSY"), False),
        (PermissionDeniedError(SERVER_TEXT, "NOPERM"), False),
    ],
    ids=str,
)
def test_only_the_errors_that_mean_it_lead_to_warming(error, warms):
    server, mine = Server(), Attending()
    server.store(STRICT, X)
    asked = []

    def question(_client, session):
        asked.append(session)
        if len(asked) == 1:
            raise error
        return "the answer"

    answer = mine.ask(Operation(Client(server)), Target(STRICT, CONTEXT, strict=True), question)
    assert answer == ("the answer" if warms else None)
    assert server.commands.count("prefix_warm") == mine.rehydrates == warms


# Counting


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (None, 1),
        (ServerError("H must be 2"), 1),
        (NOT_FOUND, 2),
        (ConnectionLostError("in the middle"), 1),
        (PermissionDeniedError("no", "NOPERM"), 1),
        (ConnectFailedError("nobody there"), 0),
        (WrongPasswordError("no", "WRONGPASS"), 0),
        (NotAuthenticatedError("no", "NOAUTH"), 0),
        (ValueError("q must be a C-contiguous float32 array"), 0),
    ],
    ids=str,
)
def test_what_was_sent_is_counted(error, sent):
    server, mine = Server(), Attending()
    server.store(STRICT, X)

    class Strict(Operation):
        def ask(self, _what, question, _otherwise):
            return question(self.client)

    def question(_client, _session):
        if error is not None:
            raise error
        return "the answer"

    target = Target(STRICT, CONTEXT, strict=True)
    if error is None:
        assert mine.ask(Strict(Client(server)), target, question) == "the answer"
    else:
        with pytest.raises(type(error)):
            mine.ask(Strict(Client(server)), target, question)
    assert mine.calls == sent


def test_a_prefix_that_was_replaced_is_no_question():
    server, mine = Server(), Attending()
    server.store(NAME, Y)
    assert generate(server, mine, X) == [None] * LAYERS
    assert mine.calls == 0


# Widths


@given(st.integers(1, 600))
def test_the_widths_that_are_taken_are_those_of_the_server(head_dim):
    try:
        check_head_dim(head_dim)
    except CommandError:
        with pytest.raises(UnsupportedAttentionError, match=rf"{head_dim} wide \(head_dim\).*multiple of 8 up to 512"):
            uniform_heads(slots(head_dim=head_dim))
        with pytest.raises(UnsupportedAttentionError, match="head_dim"):
            check_width(np.zeros((2, 1, head_dim), np.float32), slots(head_dim=head_dim))
    else:
        assert uniform_heads(slots(3, head_dim)) == (3, head_dim)


@pytest.mark.parametrize("q", [np.zeros((2, 1, 8), np.float32), np.zeros((2, 16, 1), np.float32), 3, None])
def test_queries_of_another_width_are_refused(q):
    with pytest.raises(ValueError, match=r"last axis of q must be .* heads, 16; q has the shape"):
        check_width(q, slots())
    check_width(np.zeros((2, 1, 16), np.float32), slots())
