""" The rate of each step, and the stages of a run. """
import pytest

from runs.stages import lr_factor, read_schedule, read_stages


def test_the_rate_warms_up_and_falls_as_a_cosine():
    knobs = dict(max_iters=200, warmup_iters=100, min_lr=0.0)
    assert lr_factor(knobs, 0) == .01 and lr_factor(knobs, 99) == 1
    assert lr_factor(knobs, 150) == pytest.approx(.5)
    assert lr_factor({**knobs, 'min_lr': .1}, 200) == pytest.approx(.1)


@pytest.mark.parametrize('schedule, max_iters, stages', [
    ('t2l:40%,l2t:3000,causal', 10_000, [(0, 't2l'), (4000, 'l2t'), (7000, 'causal')]),
    ('l2t:40%,causal', 7, [(0, 'l2t'), (2, 'causal')]),
    ('l2t:40%,causal', 1, [(0, 'l2t'), (0, 'causal')])])              # a stage without a step
def test_a_share_of_the_run_in_a_schedule_is_that_of_its_steps_whatever_their_number(
        schedule, max_iters, stages):
    assert read_schedule('mode', schedule, 'MODE', max_iters) == stages


@pytest.mark.parametrize('wrong', ['l2t:25%,causal:75%', 'l2t:0%,causal', 'l2t:%,causal',
                                   'l2t:101%,causal'])
def test_a_share_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=wrong.split(',')[0]):
        read_schedule('mode', wrong, 'MODE', 8)


def test_a_stage_without_a_step_is_none():
    short = read_stages('l2t:40%,causal', '8:80%,32', ('text', 'latent'), 1, 32)
    assert [(stage.mode, stage.first, stage.seq_len) for stage in short] == [('causal', 0, 32)]
