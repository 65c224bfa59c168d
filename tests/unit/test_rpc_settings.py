from typing import Annotated, Literal

import msgspec
import pytest

from member.config import MemberSettings
from rpc.server_settings import ServerSettings
from rpc.settings import SettingsError, load_or_exit, load_settings, setting


class Example(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    url: Annotated[str, setting("Where the store is.", form="redis://host", pattern="^redis://.+")]
    wait_s: Annotated[float, setting("How long to wait.", "seconds", gt=0, le=60)] = 2.5
    count: Annotated[int, setting("How many.", ge=1, le=10)] = 3
    mode: Annotated[Literal["fast", "slow"], setting("How.")] = "fast"
    peers: Annotated[tuple[str, ...], setting("Who.", max_length=3)] = ()
    loud: Annotated[bool, setting("Whether.")] = False
    port: Annotated[int, setting("Port.", ge=0, le=65535)] | None = None


URL = ["--url", "redis://a"]


def test_flags_beat_variables_beat_the_file_beats_defaults(tmp_path):
    config = tmp_path / "x.toml"
    config.write_text('url = "redis://file"\nwait_s = 1\ncount = 4\npeers = ["a", "b"]\n')
    env = {"TANDEM_COUNT": "5", "TANDEM_WAIT_S": "7.5", "HOME": "/"}
    found = load_settings(Example, ["--config", str(config), "--count", "6"], env)
    assert found == Example(url="redis://file", wait_s=7.5, count=6, peers=("a", "b"))


def test_the_file_may_be_named_by_a_variable(tmp_path):
    config = tmp_path / "x.toml"
    config.write_text('url = "redis://file"\nloud = true\n')
    assert load_settings(Example, [], {"TANDEM_CONFIG": str(config)}).loud


def test_members_are_told_how_weights_are_kept():
    given = ["--listen", "127.0.0.1:0"]
    assert load_settings(MemberSettings, given, {}).weight_quantisation == "off"
    assert load_settings(MemberSettings, [*given, "--weight-quantisation", "int8"], {}).weight_quantisation == "int8"
    with pytest.raises(SettingsError, match="flag --weight-quantisation is 'int4'; it must be one of off, int8"):
        load_settings(MemberSettings, [*given, "--weight-quantisation", "int4"], {})


def test_lists_booleans_and_none():
    assert load_settings(Example, [*URL, "--peers", "a, b,"], {}).peers == ("a", "b")
    assert load_settings(Example, [*URL, "--loud"], {}).loud
    assert not load_settings(Example, [*URL, "--no-loud"], {"TANDEM_LOUD": "true"}).loud
    assert not load_settings(Example, [*URL, "--loud=false"], {"TANDEM_LOUD": "true"}).loud
    assert load_settings(Example, [*URL, "--loud=true"], {}).loud and load_settings(Example, [*URL, "--loud"], {}).loud
    assert load_settings(Example, [*URL, "--port", "0"], {}).port == 0
    assert load_settings(Example, [*URL, "--port", "none"], {"TANDEM_PORT": "5"}).port is None
    assert load_settings(Example, URL, {"TANDEM_MODE": ""}).mode == "fast"


BAD = [
    (["--wait-s", "61"], {}, "flag --wait-s is '61'; it must be a number of seconds, over 0, at most 60"),
    (["--wait-s", "0"], {}, "over 0"),
    (["--wait-s", "nan"], {}, "--wait-s is 'nan'"),
    ([], {"TANDEM_COUNT": "many"}, "variable TANDEM_COUNT is 'many'; it must be a whole number, at least 1, at most 10"),
    ([], {"TANDEM_MODE": "medium"}, "it must be one of fast, slow"),
    ([], {"TANDEM_LOUD": "perhaps"}, "it must be true or false"),
    (["--loud=perhaps"], {}, "flag --loud"),
    (["--url", "http://x"], {}, "it must be a text, of the form redis://host"),
    (["--peers", "a,b,c,d"], {}, "a list separated by commas, at most 3 long"),
    (["--port", "70000"], {}, "at most 65535"),
    (["--wait", "1"], {}, "--wait"),
    (["--unknown", "1"], {}, "--help lists the settings"),
    (["--count"], {}, "expected one argument"),
    (["--config", "/nowhere/x.toml"], {}, "/nowhere/x.toml cannot be read: No such file"),
]


@pytest.mark.parametrize(("argv", "env", "message"), BAD, ids=[one[2][:30] for one in BAD])
def test_a_bad_setting_is_named_with_its_source_and_limit(argv, env, message):
    with pytest.raises(SettingsError) as found:
        load_settings(Example, [*URL, *argv], env)
    assert message in str(found.value)


def test_a_missing_setting_says_how_to_give_it():
    with pytest.raises(SettingsError, match="url is required: give --url or TANDEM_URL"):
        load_settings(Example, [], {})


@pytest.mark.parametrize(
    ("text", "message"), [("cuont = 3", "cuont in .* is not a setting; did you mean count"), ("= 3", "not valid TOML")]
)
def test_a_bad_file_says_where(tmp_path, text, message):
    config = tmp_path / "x.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings(Example, ["--config", str(config)], {})


def test_a_misspelt_variable_is_warned_about_and_another_process_s_is_not(caplog):
    load_settings(Example, URL, {"TANDEM_COUNTS": "3", "TANDEM_ROUTER_THING": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "variable TANDEM_COUNTS is not a setting of this process; did you mean TANDEM_COUNT?"
    ]


@pytest.mark.parametrize("kind", [Example, ServerSettings, MemberSettings])
def test_help_tells_every_setting_with_default_and_unit(kind, capsys):
    with pytest.raises(SystemExit) as left:
        load_settings(kind, ["--help"], {}, prog="x")
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for info in msgspec.structs.fields(kind):
        assert "--" + info.name.replace("_", "-") in text
        assert "TANDEM_" + info.name.upper() in text
    if kind is Example:
        assert "How long to wait. [seconds; over 0, at most 60; default 2.5; TANDEM_WAIT_S]" in text


def test_a_process_ends_with_2_and_a_sentence(capsys):
    with pytest.raises(SystemExit) as left:
        load_or_exit(Example, [*URL, "--count", "0"], prog="tandem-x")
    assert left.value.code == 2
    assert capsys.readouterr().err == "tandem-x: flag --count is '0'; it must be a whole number, at least 1, at most 10\n"


def test_settings_can_be_checked_without_a_start(capsys):
    for arguments, code in (([*URL, "--check-settings"], 0), ([*URL, "--check-settings", "--count", "0"], 2)):
        with pytest.raises(SystemExit) as left:
            load_or_exit(Example, arguments, prog="tandem-x")
        assert left.value.code == code
    assert "it must be a whole number" in capsys.readouterr().err


def test_a_flag_that_is_no_setting_is_told_with_the_one_that_it_resembles():
    with pytest.raises(SettingsError, match=r"--cont is not a setting; did you mean --count\? \(--help lists the settings\)"):
        load_settings(Example, [*URL, "--cont=3"], {})


def test_rules_between_settings():
    with pytest.raises(SettingsError, match=r"drain_settle_s is 40.0; it must be at most drain_timeout_s, 30.0"):
        load_settings(MemberSettings, ["--drain-settle-s", "40"], {})
    with pytest.raises(SettingsError, match=r"advertise is required when listen is 0\.0\.0\.0:5"):
        load_settings(MemberSettings, ["--listen", "0.0.0.0:5"], {})
    assert load_settings(MemberSettings, ["--listen", "0.0.0.0:5", "--advertise", "pod-1"], {}).advertise == "pod-1"


class Guarded(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Settings with a secret, and with one that may hold one."""

    password: Annotated[str, setting("Of the store.", secret=bool, max_length=8)] = ""
    url: Annotated[str, setting("Of the store.", secret=lambda url: "@" in url)] = ""


def test_a_secret_is_no_flag_and_in_no_error(tmp_path):
    assert load_settings(Guarded, ["--url", "redis://a"], {"TANDEM_PASSWORD": "hidden"}).password == "hidden"
    for argv in (["--password", "hidden"], ["--url=redis://hidden@a"]):
        with pytest.raises(SettingsError, match=r"holds a secret.*as the variable TANDEM_") as bad:
            load_settings(Guarded, argv, {})
        assert "hidden" not in str(bad.value)
    with pytest.raises(SettingsError, match="variable TANDEM_PASSWORD is not shown; it must be a text, at most 8 long") as bad:
        load_settings(Guarded, [], {"TANDEM_PASSWORD": "hidden-and-long"})
    assert "hidden" not in str(bad.value)
    config = tmp_path / "a.toml"
    config.write_text('password = "hidden"')
    assert load_settings(Guarded, ["--config", str(config)], {}).password == "hidden"
