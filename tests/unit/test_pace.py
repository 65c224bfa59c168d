"""A decode member that gives way: never longer than a period, and only while enough prompts wait beside it."""

from decode_svc.pace import Pace, PaceLimits


def test_steps_begin_a_period_apart_while_enough_prompts_wait() -> None:
    pace = Pace(PaceLimits(prompts=2, period_s=0.5))
    assert not pace.gives_way(9, 10.0), "nothing ran yet: nobody's next token is due"
    pace.began(10.0)
    assert not pace.gives_way(1, 10.1) and pace.due_at is None
    assert pace.gives_way(2, 10.1) and pace.due_at == 10.5
    assert not pace.gives_way(1, 10.2) and pace.due_at is None, "they do not wait any more"
    assert pace.gives_way(3, 10.25)
    assert not pace.gives_way(3, 10.5) and pace.due_at is None
    pace.began(10.5)
    assert pace.gives_way(2, 10.75) and pace.due_at == 11.0


def test_a_step_longer_than_the_period_is_followed_at_once() -> None:
    pace = Pace(PaceLimits(prompts=1, period_s=0.25))
    pace.began(1.0)
    assert not pace.gives_way(50, 1.25)
    assert not Pace(PaceLimits(prompts=1, period_s=0.0)).gives_way(50, 1.0)
