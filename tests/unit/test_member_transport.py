"""A transport setting that does not fit ends a member's start with a sentence and the status of bad settings."""

import pytest

from member.config import MemberSettings
from member.transport import prepare_or_exit
from rpc.application import ExitCode


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transport": "memory"}, "works within one process only"),
        ({"net_devices": "nosuch0"}, "nosuch0"),
        ({"transfer_ports": "80-90"}, "1024"),
    ],
)
def test_a_setting_that_does_not_fit_is_told(settings: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare_or_exit(MemberSettings(**settings), "python -m prefill_svc")
    told = capsys.readouterr().err
    assert ended.value.code == ExitCode.BAD_SETTINGS
    assert told.startswith("python -m prefill_svc: ") and said in told and told.count("\n") == 1
