"""Options from the command line, the environment and a file: one meaning, one precedence."""

from __future__ import annotations

import argparse
from pathlib import Path

import attrs
import pytest

from pion.config import MIB, Config, fields, flag_name
from pion.errors import StartupError
from pion.options import add_arguments, build_config, environment_name, parse_value, show_value


def parse(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args(argv))


def test_defaults() -> None:
    assert build_config(parse(), None, {}) == Config()


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "pion.toml"
    file.write_text('max-sessions = 10\nport = 1\nmax_bulk = "2mb"\nplugins = ["all", "-stats"]\n')
    environment = {"PION_MAX_SESSIONS": "20", "PION_PORT": "2"}
    config = build_config(parse("--port", "3"), str(file), environment)
    assert (config.port, config.max_sessions, config.max_bulk_bytes) == (3, 20, 2 * MIB)
    assert config.plugins == "all,-stats"


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "pion.toml"
    file.write_text("port = 7\n")
    assert build_config({}, None, {"PION_CONFIG": str(file)}).port == 7


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_every_field_comes_from_every_source(field: attrs.Attribute, tmp_path: Path) -> None:
    choices = field.metadata["choices"]
    if choices:
        text = choices[-1]
    elif isinstance(field.default, bool):
        text = "no" if field.default else "yes"
    elif isinstance(field.default, int | float):
        text = str(field.default + 1 if field.metadata["high"] != field.default else field.default - 1)
    else:
        text = "some/text"
    wanted = parse_value(field, text, "test")
    assert wanted != field.default
    argv = [f"--{flag_name(field)}"] + ([] if field.default is False else [text])
    assert getattr(build_config(parse(*argv), None, {}), field.name) == wanted
    assert getattr(build_config({}, None, {environment_name(field): text}), field.name) == wanted
    file = tmp_path / "pion.toml"
    file.write_text(f'{flag_name(field)} = "{text}"\n')
    assert getattr(build_config({}, str(file), {}), field.name) == wanted


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_every_field_is_described(field: attrs.Attribute) -> None:
    assert len(field.metadata["help"]) > 15
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        assert field.metadata["unit"]
    assert show_value(field, field.default) is not None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--port", "x"), "--port: expected an integer from 0 to 65535, got 'x'"),
        (("--port", "70000"), "--port: expected an integer from 0 to 65535"),
        (("--max-bulk", "1xb"), "suffixes kb, mb, gb"),
        (("--max-bulk", "1"), "--max-bulk: expected an integer of bytes"),
        (("--grace", "nan"), "--grace: expected a number of s"),
        (("--log-format", "xml"), "--log-format: expected text or json"),
        (("--protected-mode", "maybe"), "--protected-mode: expected yes or no"),
    ],
)
def test_bad_values(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(StartupError, match=message.replace("(", r"\(")):
        build_config(parse(*argv), None, {})


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        build_config({}, str(tmp_path / "none.toml"), {})
    file = tmp_path / "pion.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(StartupError, match="unknown key prot"):
        build_config({}, str(file), {})
    file.write_text("port = = 1\n")
    with pytest.raises(StartupError, match="not TOML"):
        build_config({}, str(file), {})
    file.write_bytes(b"unix = '\xff'\n")
    with pytest.raises(StartupError, match=r"pion\.toml: not UTF-8"):
        build_config({}, str(file), {})
    file.write_text("port = true\n")
    with pytest.raises(StartupError, match="expected an integer"):
        build_config({}, str(file), {})


def test_text_is_taken_as_it_is() -> None:
    assert build_config(parse("--requirepass", " s e "), None, {}).requirepass == " s e "
    assert build_config({}, None, {"PION_REQUIREPASS": "\ttab"}).requirepass == "\ttab"


def test_a_configuration_that_is_printed_hides_the_password() -> None:
    assert "s3cret" not in repr(build_config(parse("--requirepass", "s3cret"), None, {}))


def test_a_row_has_a_highest_width() -> None:
    with pytest.raises(StartupError, match="--max-dim: expected an integer of values from 1 to"):
        build_config(parse("--max-dim", "99999999999999"), None, {})
