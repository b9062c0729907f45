"""The plugin host: where plugins come from, which are selected, what happens when one is wrong, and every hook."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import attrs
import pytest
import trio

from pion import Record
from pion.client import PionClient
from pion.client.errors import NotPersistedError
from pion.config import Config
from pion.errors import PluginError, StartupError
from pion.plugins import BUILTIN_PLUGINS, KVCACHE_PLUGINS, available, make_plugin_manager, make_registry, select
from pion.replies import BinaryReply, ErrorReply
from pion.server import serve
from pion.testing import ServerProcess, make_harness, running_server

COMMAND = """
import pion


async def answer(context, argv):
    return {value!r}


@pion.hookimpl
def register_commands(config):
    row = pion.Command(name={name!r}, arity=1, summary="A test.", since="1", handler=answer, replaces={replaces!r})
    return [row]
"""


class Folder:
    """A plugins directory that a test fills; `config` selects its plugins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, source: str) -> None:
        (self.path / f"{name}.py").write_text(dedent(source), encoding="utf-8")

    def add_command(self, name: str, command: str, value: object = b"hello", replaces: str | None = None) -> None:
        self.add(name, COMMAND.format(name=command, value=value, replaces=replaces))

    def config(self, plugins: str = "") -> Config:
        return Config(plugins=plugins, plugins_dir=str(self.path))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    before = set(sys.modules)
    path = tmp_path / "plugins"
    path.mkdir()
    yield Folder(path)
    for name in set(sys.modules) - before:
        if name.startswith(("pion_plugin_", "acme_")):
            del sys.modules[name]


# Where plugins come from


def test_builtin_families_are_plugins_of_the_same_host() -> None:
    manager = make_plugin_manager(Config(plugins=",".join(BUILTIN_PLUGINS)))
    assert [name for name, _ in reversed(manager.list_name_plugin())] == list(BUILTIN_PLUGINS)


async def test_single_file_plugin(folder: Folder) -> None:
    folder.add_command("greeter", "GREET", b"good day")
    harness = make_harness(folder.config())
    assert await harness.call("GREET") == b"good day"
    assert harness.services.registry.origin(harness.services.registry.get("GREET")) == "greeter"
    assert "greeter" in harness.services.plugins


async def test_installed_plugin_is_found_by_its_entry_point(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "acme_pion-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-pion\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pion]\nacme = acme_pion\n")
    (site / "acme_pion.py").write_text(COMMAND.format(name="ACME.PING", value=b"meep", replaces=None))
    monkeypatch.syspath_prepend(str(site))

    source = next(source for source in available(Config()) if source.name == "acme")
    assert (source.kind, source.location) == ("installed", "acme_pion")
    assert await make_harness(Config(plugins="connection,acme")).call("ACME.PING") == b"meep"


def test_plugins_dir_must_exist(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"--plugins-dir .*nowhere: not a directory"):
        available(Config(plugins_dir=str(tmp_path / "nowhere")))


def test_two_plugins_of_one_name_are_refused(folder: Folder) -> None:
    folder.add_command("vstore", "GREET")
    with pytest.raises(PluginError, match=r"plugin name vstore is used twice: pion\.commands\.vstore and .*vstore\.py"):
        available(folder.config())


# Which are selected


@pytest.fixture
def three(folder: Folder) -> Folder:
    for name in ("alpha", "beta", "gamma"):
        folder.add_command(name, name)
    return folder


def chosen(folder: Folder, plugins: str, *, kvcache: bool = False) -> list[str]:
    config = Config(plugins=plugins, plugins_dir=str(folder.path), kvcache=kvcache)
    sources = [source for source in available(config) if source.kind != "installed"]
    return [source.name for source in select(config, sources)]


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ("", [*BUILTIN_PLUGINS, "alpha", "beta", "gamma"]),
        ("all", [*BUILTIN_PLUGINS, "alpha", "beta", "gamma"]),
        ("all,-beta", [*BUILTIN_PLUGINS, "alpha", "gamma"]),
        ("-beta,-stats", [*(name for name in BUILTIN_PLUGINS if name != "stats"), "alpha", "gamma"]),
        ("alpha", ["alpha"]),
        ("gamma, connection ,alpha", ["connection", "alpha", "gamma"]),
        ("alpha,-alpha,beta", ["beta"]),
        ("all,-all", None),
        ("alpha,delta", None),
    ],
)
def test_selection(three: Folder, plugins: str, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(PluginError, match=r"--plugins: no plugin named (all|delta); there are: .*alpha, .*beta"):
            chosen(three, plugins)
    else:
        assert chosen(three, plugins) == expected


def test_kvcache_selects_its_families_and_keeps_plugins_put_there_on_purpose(three: Folder) -> None:
    assert chosen(three, "", kvcache=True) == [*KVCACHE_PLUGINS, "alpha", "beta", "gamma"]
    assert chosen(three, "stats", kvcache=True) == ["stats"]


def test_a_plugin_that_is_not_selected_is_not_loaded(folder: Folder) -> None:
    folder.add("broken", "raise RuntimeError('must not run')")
    folder.add_command("alpha", "ALPHA")
    make_plugin_manager(folder.config("alpha"))


# Errors name the plugin


def registry_of(folder: Folder, plugins: str) -> dict[str, str]:
    config = folder.config(plugins)
    registry = make_registry(make_plugin_manager(config), config)
    return {row.name: registry.origin(row) for row in registry}


def test_a_duplicate_command_names_both_plugins(three: Folder) -> None:
    three.add_command("delta", "Alpha")
    with pytest.raises(PluginError, match=r"command ALPHA is in plugin alpha and in plugin delta.*replaces='alpha'"):
        registry_of(three, "alpha,delta")


async def test_replaces_overrides_the_named_plugin_only(three: Folder) -> None:
    three.add_command("delta", "ALPHA", b"better", replaces="alpha")
    assert registry_of(three, "alpha,delta") == {"ALPHA": "delta"}
    assert await make_harness(three.config("alpha,delta")).call("alpha") == b"better"

    three.add_command("epsilon", "BETA", replaces="alpha")
    with pytest.raises(PluginError, match="command BETA is in plugin beta and in plugin epsilon"):
        registry_of(three, "beta,epsilon")


def test_an_import_error_names_the_plugin_and_its_file(folder: Folder) -> None:
    folder.add("hopeful", "import a_module_that_nobody_has")
    with pytest.raises(PluginError, match=r"plugin hopeful \(.*hopeful\.py\) can't be loaded: ModuleNotFoundError"):
        make_plugin_manager(folder.config("hopeful"))
    assert "pion_plugin_hopeful" not in sys.modules


def test_a_misspelt_hook_is_refused(folder: Folder) -> None:
    folder.add("typo", "import pion\n\n@pion.hookimpl\ndef register_comands(config):\n    return []\n")
    with pytest.raises(PluginError, match=r"plugin typo .*register_comands"):
        make_plugin_manager(folder.config("typo"))


def test_a_hook_with_an_unknown_argument_is_refused(folder: Folder) -> None:
    folder.add("greedy", "import pion\n\n@pion.hookimpl\ndef register_commands(config, sockets):\n    return []\n")
    with pytest.raises(PluginError, match=r"plugin greedy .*sockets"):
        make_plugin_manager(folder.config("greedy"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return ['GET']", r"plugin odd: register_commands must return Command rows, got 'GET'"),
        ("raise ValueError('no luck')", r"plugin odd: register_commands failed: ValueError\('no luck'\)"),
        (
            "return [pion.Command(name='LONE CHILD', arity=2, summary='s', since='1', handler=print)]",
            "plugin odd: LONE CHILD has no row for LONE",
        ),
        ("return [pion.Command(name='NOBODY', arity=1, summary='s', since='1')]", "plugin odd: NOBODY has no handler"),
    ],
)
def test_wrong_rows_name_the_plugin(folder: Folder, body: str, message: str) -> None:
    folder.add("odd", f"import pion\n\n@pion.hookimpl\ndef register_commands(config):\n    {body}\n")
    with pytest.raises(PluginError, match=message):
        registry_of(folder, "odd")


async def test_a_handler_that_fails_is_an_error_reply_that_names_the_plugin(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.add_command("clumsy", "TRIP")
    path = folder.path / "clumsy.py"
    path.write_text(path.read_text().replace("return b'hello'", "raise LookupError('over a cable')"))
    harness = make_harness(folder.config("clumsy"))
    reply = await harness.call("TRIP")
    assert isinstance(reply, ErrorReply)
    assert reply.text == "internal error in TRIP (plugin clumsy); see the server's log"
    assert "over a cable" in caplog.text


# The hooks. tests/test_docs.py checks that there is a test here for every one.


def test_hook_register_commands(folder: Folder) -> None:
    """It gets the configuration, and is called in plugin order, before any service exists."""
    folder.add(
        "seen",
        """
        import pion

        calls = []

        @pion.hookimpl
        def register_commands(config):
            calls.append(config)
            return []
        """,
    )
    config = folder.config("seen")
    make_registry(make_plugin_manager(config), config)
    assert sys.modules["pion_plugin_seen"].calls == [config]


BINARY = """
import pion


async def answer(context, argv):
    return pion.OK


async def packed(context, values, body):
    return pion.BinaryReply(meta=b"!", body=values[0] + bytes(body))


@pion.hookimpl
def register_commands(config):
    return [pion.Command(name={name!r}, arity=1, summary="A test.", since="1", handler=answer, replaces={replaces!r})]


@pion.hookimpl
def register_binary(config):
    fields = (pion.Field("word", pion.FieldKind.NAME),)
    return [pion.BinaryCommand(code={code!r}, command={command!r}, handler=packed, meta=fields, body="more")]
"""


def add_binary(folder: Folder, plugin: str, code: object, command: str, replaces: str | None = None) -> None:
    name = "OTHER" if command == "NOBODY.KNOWS" else command
    folder.add(plugin, BINARY.format(name=name, code=code, command=command, replaces=replaces))


async def test_hook_register_binary(folder: Folder) -> None:
    """Its rows name commands of the merged table, which say everything about them but the handler."""
    add_binary(folder, "packer", 0xE0, "PACK.IT")
    harness = make_harness(folder.config("packer"))
    assert await harness.call_binary(0xE0, b"word", body=b" and more") == BinaryReply(0, b"!", b"word and more")
    assert harness.services.monitor.counter("pack.it").calls == 1


@pytest.mark.parametrize(
    ("code", "command", "message"),
    [
        (
            0xE0,
            "NOBODY.KNOWS",
            "plugin odd: code 0xe0 of the binary lane is for NOBODY.KNOWS, but no plugin has that command",
        ),
        (0, "PACK.IT", "plugin odd: code 0x00 of the binary lane must be from 0x01 to 0xff"),
        (256, "PACK.IT", "plugin odd: code 0x100 of the binary lane must be from 0x01 to 0xff"),
    ],
)
def test_hook_register_binary_with_wrong_rows(folder: Folder, code: int, command: str, message: str) -> None:
    add_binary(folder, "odd", code, command)
    with pytest.raises(PluginError, match=message):
        make_harness(folder.config("odd"))


def test_hook_register_binary_with_what_is_no_row(folder: Folder) -> None:
    folder.add("odd", "import pion\n\n@pion.hookimpl\ndef register_binary(config):\n    return ['GET']\n")
    with pytest.raises(PluginError, match="plugin odd: register_binary must return BinaryCommand rows, got 'GET'"):
        make_harness(folder.config("odd"))


def test_hook_register_binary_with_a_code_that_two_have(folder: Folder) -> None:
    add_binary(folder, "one", 0xE0, "ONE.PACKS")
    add_binary(folder, "two", 0xE0, "TWO.PACKS")
    with pytest.raises(PluginError, match="code 0xe0 of the binary lane is in plugin one and in plugin two"):
        make_harness(folder.config("one,two"))


async def test_hook_register_binary_is_no_way_around_a_plugin_that_replaces_the_command(folder: Folder) -> None:
    add_binary(folder, "old", 0xE0, "PACK.IT")
    folder.add_command("strict", "PACK.IT", b"no", replaces="old")
    harness = make_harness(folder.config("old,strict"))
    assert 0xE0 not in harness.services.registry.binary
    # The one that replaces it may have rows of its own.
    add_binary(folder, "zealous", 0xE0, "PACK.IT", replaces="old")
    harness = make_harness(folder.config("old,zealous"))
    assert harness.services.registry.binary[0xE0].command == "PACK.IT"
    assert await harness.call_binary(0xE0, b"a") == BinaryReply(0, b"!", b"a")


def test_hook_startup(folder: Folder) -> None:
    """It runs once, with the services, in plugin order, and its state is there for the others."""
    for name in ("first", "second"):
        folder.add(
            name,
            f"""
            import pion

            @pion.hookimpl
            def startup(services):
                services.state.setdefault("order", []).append({name!r})
            """,
        )
    assert make_harness(folder.config("second,first")).services.state["order"] == ["first", "second"]


def test_hook_startup_failure_names_the_plugin(folder: Folder) -> None:
    folder.add("grumpy", "import pion\n\n@pion.hookimpl\ndef startup(services):\n    raise OSError('no disk')\n")
    with pytest.raises(PluginError, match=r"plugin grumpy: startup failed: OSError\('no disk'\)"):
        make_harness(folder.config("grumpy"))


def test_hook_register_info(folder: Folder) -> None:
    """The section is formatted when it is asked for, not before."""
    folder.add(
        "weather",
        """
        import pion

        def rows():
            return [("sky", "blue")]

        @pion.hookimpl
        def register_info(services):
            return [pion.InfoSection("Weather", rows)]
        """,
    )
    sections = make_harness(folder.config("weather")).services.info_sections
    assert [(section.title, section.rows()) for section in sections] == [("Weather", [("sky", "blue")])]


LIFE = """
import pion
import trio


@pion.hookimpl
def startup(services):
    services.state["events"] = ["startup"]


@pion.hookimpl
def register_services(services):
    events = services.state["events"]

    async def run(*, task_status):
        events.append("service starts")
        await trio.lowlevel.checkpoint()
        events.append("service started")
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            events.append(f"service ends with {len(services.clients)} clients")

    return [run]


@pion.hookimpl
def register_disconnect(services):
    return lambda session: services.state["events"].append(f"client {session.id} gone")


@pion.hookimpl
def shutdown(services):
    services.state["events"].append("shutdown")
"""


async def one_life(config: Config) -> list[str]:
    """Start a server, connect, talk, leave the connection open, stop the server; what the plugin saw."""
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus) -> None:
            await serve(config, task_status=task_status)

        started = await nursery.start(run)
        events = started.services.state["events"]
        events.append("listening")
        async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
            await stream.send_all(b"NOPE\r\n")
            assert (await stream.receive_some(100)).startswith(b"-ERR unknown command")
            started.services.request_shutdown(False)
            assert await stream.receive_some(100) == b""
    return list(events)


@pytest.fixture
def life(folder: Folder) -> Config:
    folder.add("life", LIFE)
    return Config(port=0, dir="", plugins="life", plugins_dir=str(folder.path))


DURABLE = """
import pion


class Words(pion.Durable):
    family = {family!r}

    def __init__(self):
        self.words = []

    def replay(self, meta, data):
        self.words.append(meta + (data.read() if data is not None else b""))

    def undo(self, items):
        del self.words[-len(items):]

    def capture(self):
        return iter([pion.Captured(word[:1], (word[1:2], word[2:])) for word in self.words])


async def add(context, argv):
    words = context.services.state["words"]
    words.words.append(bytes(argv[1]))
    await words.keep(pion.Record(argv[1][:1], argv[1][1:]))
    return list(words.words)


@pion.hookimpl
def register_commands(config):
    return [pion.Command(name="ADD", arity=2, summary="A test.", since="1", handler=add, flags=pion.Flag.WRITE)]


@pion.hookimpl
def startup(services):
    services.state["words"] = Words()


@pion.hookimpl
def register_durable(services):
    return [services.state["words"]]
"""


async def test_hook_register_durable(folder: Folder, tmp_path: Path) -> None:
    """It is called after `startup`; what the log and a snapshot kept is replayed into it before the server listens."""
    folder.add("words", DURABLE.format(family="words"))
    config = folder.config("vstore,kvprefix,words")
    words: list[bytes] = []
    for word in (b"one", b"two", b"a", b"four"):
        async with running_server(config, directory=tmp_path / "data") as server:
            assert server.services.state["words"].words == words
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                await stream.send_all(b"ADD %s\r\n" % word)
                words.append(word)
                expected = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
                assert await stream.receive_some(1000) == expected
                if word == b"two":
                    await stream.send_all(b"KV.PREFIX.SAVE\r\n")
                    assert await stream.receive_some(1000) == b"+OK\r\n"


def test_hook_register_durable_when_the_disk_fails(folder: Folder, tmp_path: Path) -> None:
    """A real process whose files may not grow: what it could not write is taken back, and SAVE ends the refusal."""
    folder.add("words", DURABLE.format(family="words"))
    data = tmp_path / "data"
    options = ("--dir", str(data), "--plugins-dir", str(folder.path))
    with ServerProcess(*options) as server, PionClient(port=server.port) as client:
        assert client.execute("ADD", "one") == [b"one"]
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        longest = max(path.stat().st_size for path in data.iterdir())
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (longest, unlimited[1]))
        for command in (("ADD", "lost"), ("ADD", "lost too"), ("KV.PREFIX.SAVE",)):
            with pytest.raises(NotPersistedError, match="File too large"):
                client.execute(*command)
        assert client.info("persistence")["changes_refused"] == "File too large"
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        with pytest.raises(NotPersistedError, match=r"KV\.PREFIX\.SAVE"):
            client.execute("ADD", "too early")
        assert client.execute("KV.PREFIX.SAVE") == "OK"
        assert client.execute("ADD", "two") == [b"one", b"two"]
        server.kill()
    with ServerProcess(*options) as server, PionClient(port=server.port) as client:
        assert client.execute("ADD", "three") == [b"one", b"two", b"three"]


def test_hook_register_durable_in_a_server_that_keeps_nothing(folder: Folder) -> None:
    folder.add("words", DURABLE.format(family="words"))
    (words,) = make_harness(folder.config("words")).services.durable
    assert words.keep(Record(b"x")) is None


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (("words", "words"), "two plugins keep state as 'words'; each needs a name of its own"),
        (("w" * 33,), "a durable family's name must be 1 to 32 ASCII characters, got 'w"),
        (("",), "a durable family's name must be 1 to 32 ASCII characters, got ''"),
        (("wörter",), "a durable family's name must be 1 to 32 ASCII characters, got 'w"),
    ],
)
async def test_wrong_families_refuse_the_start(
    folder: Folder, tmp_path: Path, families: tuple[str, ...], message: str
) -> None:
    for index, family in enumerate(families):
        folder.add(f"words{index}", DURABLE.format(family=family).replace('"ADD"', f'"ADD{index}"'))
    config = folder.config(",".join(f"words{index}" for index in range(len(families))))
    with pytest.raises(StartupError, match=message):
        await serve(attrs.evolve(config, port=0, dir=str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


TIER = """
import pion
from pion.testing.tiers import MemoryTier


@pion.hookimpl
def register_tiers(services):
    services.state["asked"] = True
    return {"mem": MemoryTier}
"""


def test_hook_register_tiers(folder: Folder) -> None:
    """It is asked if there is a tier, and what it returns makes the tier of that scheme."""
    folder.add("scratch", TIER)
    config = folder.config("scratch")
    assert "asked" not in make_harness(config).services.state
    services = make_harness(attrs.evolve(config, tier_dir="mem://here", max_bytes=1 << 30)).services
    assert services.state["asked"]
    assert services.tiering is not None
    assert services.tiering.tier.url == "mem://here"
    with pytest.raises(StartupError, match=r"there is no tier for mum://; a path, or one of: file://, mem://"):
        make_harness(attrs.evolve(config, tier_dir="mum://here", max_bytes=1 << 30))


def test_hook_register_tiers_with_a_scheme_that_two_have(folder: Folder) -> None:
    folder.add("scratch", TIER)
    folder.add("twin", TIER)
    with pytest.raises(PluginError, match="tiers of mem:// are in plugin scratch and in plugin twin"):
        make_harness(attrs.evolve(folder.config("scratch,twin"), tier_dir="mem://here", max_bytes=1 << 30))


async def test_hook_register_services(life: Config) -> None:
    """The service runs before the first connection and until after the last."""
    events = await one_life(life)
    assert events.index("service started") < events.index("listening")
    assert "service ends with 0 clients" in events


async def test_hook_register_disconnect(life: Config) -> None:
    events = await one_life(life)
    assert events.count("client 1 gone") == 1
    assert events.index("client 1 gone") < events.index("service ends with 0 clients")


async def test_hook_shutdown(life: Config) -> None:
    """It is the very last thing, once."""
    events = await one_life(life)
    assert events[0] == "startup"
    assert events.count("shutdown") == 1
    assert events[-1] == "shutdown"


async def test_hook_shutdown_is_not_called_after_a_failed_startup(folder: Folder) -> None:
    folder.add("life", LIFE.replace('["startup"]', '["startup"]\n    raise OSError("no disk")'))
    config = folder.config("life")
    with pytest.raises(PluginError, match="plugin life: startup failed"):
        await serve(config)


def test_a_row_that_replaces_nothing_refuses_the_start(folder: Folder) -> None:
    folder.add_command("alpha", "ALPHA", replaces="server")
    config = folder.config("alpha")
    with pytest.raises(PluginError, match="plugin alpha: ALPHA says replaces='server', but no plugin before it has"):
        make_registry(make_plugin_manager(config), config)


def test_a_finished_command_table_takes_no_more_rows(folder: Folder) -> None:
    folder.add_command("alpha", "ALPHA")
    config = folder.config("alpha")
    registry = make_registry(make_plugin_manager(config), config)
    with pytest.raises(PluginError, match="plugin late: the command table is complete"):
        registry.add("late", [])


async def test_a_plugin_author_sees_that_a_value_is_no_reply(folder: Folder) -> None:
    folder.add_command("odd", "ODD", {"a": 1})
    with pytest.raises(TypeError, match="dict is not a reply"):
        await make_harness(folder.config("odd")).call("ODD")
