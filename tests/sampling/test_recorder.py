""" A text being written is kept as it was written, and shown in a terminal and as a picture. """
import re
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
import torch

from corpora.tokenizers import byte_tokenizer
from diffusion import MaskedText
from launch import flags, run_each
from samplers import SAMPLERS
from sampling import recorder
from sampling.animation import animation
from sampling.recorder import Recorder, pieces_of, printable, watcher
from toys import l2t, net_of, toy_run

BYTES = byte_tokenizer()
MASK, EOS, PAD = BYTES.vocab_size, BYTES.eos, BYTES.pad


@pytest.fixture
def loaded(of_mixed):
    return of_mixed


def some_latents(run, n=3):
    return torch.randn(n, *run.meta['latent_shape'], generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('name', SAMPLERS)
def test_a_recorder_changes_no_id_and_has_every_state(loaded, name):
    z, settings = some_latents(loaded), dict(sampler=name, steps=5, temperature=1.0)
    plain, states, recorder = l2t(loaded.net, z, **settings), [], Recorder(loaded.net.text.mask_id)
    l2t(loaded.net, z, lambda tokens, *said: states.append(tokens.clone()), **settings)
    assert l2t(loaded.net, z, recorder, **settings).equal(plain)
    assert len(recorder.frames) == len(states)
    for i, (frame, state) in enumerate(zip(recorder.frames, states)):
        assert frame.tokens.equal(state) and frame.step == i
    assert (states[0] == loaded.net.text.mask_id).all() and states[-1].equal(plain)


@pytest.mark.parametrize('name', ['confidence', 'first_hitting', 'autoregressive'])
def test_probabilities_are_those_of_the_network_in_the_state_before_the_step(loaded, name):
    z, recorder = some_latents(loaded), Recorder(loaded.net.text.mask_id, n_top=4)
    l2t(loaded.net, z, recorder, sampler=name, steps=6, temperature=1.0)
    for before, frame in zip(recorder.frames, recorder.frames[1:]):
        t, n_causal = torch.zeros(3), 3
        if name != 'autoregressive':
            share = (before.tokens == loaded.net.text.mask_id).double().mean(1)
            t, n_causal = loaded.net.text.time_of_share(share).float(), 0
        logits, _ = loaded.net.model(before.tokens, z, t, torch.zeros(3), predict=('text',),
                                     n_causal=n_causal)
        logits[..., loaded.net.banned] = -torch.inf
        p = logits.softmax(-1).detach()                                  # (B, L, V)
        asked = frame.asked
        assert torch.allclose(frame.top_p[asked], p.topk(4, -1).values[asked], atol=1e-4)
        written = frame.tokens.clamp(max=p.shape[-1] - 1)
        of_written = p.gather(-1, written[..., None])[..., 0]
        new = asked & frame.is_new
        assert new.any() and torch.allclose(frame.p[new], of_written[new], atol=1e-4)
        stays = ~frame.is_new & (frame.tokens < loaded.net.text.mask_id)
        assert frame.p[stays].nan_to_num(-1).equal(before.p[stays].nan_to_num(-1))


def test_pieces_are_the_text_cut_where_its_tokens_are_without_control_characters():
    text = 'né 日本 🙂!'
    ids = BYTES.encode(text)
    pieces = pieces_of(BYTES, [*ids, EOS, PAD], MASK)
    assert len(pieces) == len(ids) and ''.join(pieces) == text
    assert pieces_of(BYTES, [*ids, EOS, PAD], MASK, to_end=True)[len(ids):] == ['EOS', 'PAD']
    assert ''.join(pieces_of(BYTES, [ids[0], MASK, *ids[1:3]], MASK)) == 'n░é'
    assert ''.join(pieces_of(BYTES, [ids[1], MASK], MASK)) == '\ufffd░', 'a mask cuts a character'
    hostile = 'a\x1b[2J\r\x07\x9b31m\u202e\nb'
    shown = ''.join(pieces_of(BYTES, BYTES.encode(hostile), MASK))
    assert shown == printable(hostile) and shown.isprintable() and shown[0] + shown[-1] == 'ab'


def use_terminal(monkeypatch):
    monkeypatch.delenv('NO_COLOR', raising=False)
    monkeypatch.setattr(recorder, 'PAUSE', 0)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)


@pytest.mark.parametrize('knobs', [
    dict(sampler='confidence'), dict(sampler='cached', steps=64), dict(sampler='autoregressive'),
    dict(sampler='ancestral', steps=64), dict(sampler='first_hitting', guidance=2.)],
    ids=lambda knobs: knobs['sampler'])
def test_a_terminal_shows_how_often_the_network_read_a_text(loaded, monkeypatch, capsys, knobs):
    """ As results.json has it: a step of ancestral reads every text, one of cached only those that
    it writes on, and guidance reads twice. """
    use_terminal(monkeypatch)
    z = some_latents(loaded, 4)
    l2t(loaded.net, z, temperature=1.0, **knobs)           # what came before is not counted
    loaded.net.row_calls = before = 1000
    l2t(loaded.net, z, watcher(loaded, 4), temperature=1.0, **knobs)
    calls = (loaded.net.row_calls - before) / 4
    assert f'writes · calls {calls:.1f} of 32 · 0 masked' in capsys.readouterr().out
    expected = dict(ancestral=64, first_hitting=64, confidence=32)
    assert calls == expected.get(knobs['sampler'], calls)
    assert knobs['sampler'] != 'cached' or calls < 32


def test_a_terminal_shows_each_step_in_place(loaded, monkeypatch, capsys):
    use_terminal(monkeypatch)
    l2t(loaded.net, some_latents(loaded, 2), watcher(loaded, 2), sampler='first_hitting', steps=4)
    frames = capsys.readouterr().out.split('\x1b[J')
    assert len(frames) == 5 and all(frame.startswith('\x1b[') for frame in frames[1:])
    assert 'writes · calls 0.0 of 32 · 32 masked' in frames[0]
    assert 'writes · calls 4.0 of 32 · 0 masked' in frames[-1]


def test_a_pipe_gets_a_line_for_each_step_that_changes_the_text(capsys):
    show = watcher(toy_run(net_of(text=MaskedText(MASK)), tokenizer=BYTES), 1)
    show(torch.tensor([[MASK] * 3]))
    for ids in ([97, MASK, MASK], [97, MASK, PAD], [97, EOS, PAD]):
        show(torch.tensor([ids]), torch.zeros(1, MASK), torch.tensor([2]))
    assert capsys.readouterr().out.splitlines() == ['a░░', 'a']


# ---- the picture

def texts_of(svg):
    """ [(what is said above, text)] of each frame of a picture. """
    found, name = [], '{http://www.w3.org/2000/svg}'
    for group in ET.fromstring(svg).iter(f'{name}g'):
        said, *lines = [''.join(text.itertext()) for text in group.iter(f'{name}text')]
        found.append((said, ''.join(lines)))
    return found


def test_the_picture_has_every_frame_of_both_ways_and_asks_for_nothing(mixed, loaded, here):
    text = 'a red dog runs near the river'
    asked = ['sample.py', *flags(out_dir=mixed, device='cpu', dtype='float32', steps=4)]
    others = [*asked, '--watch=true', '--svg=b.svg']
    (code, out, err), *results = run_each(
        [*asked, *flags(text=text, svg='a.svg')], [*others, '--mode=unconditional'],
        [*others, '--mode=infill', '--text=a red [MASK:3] near the river'],
        [*others, '--mode=text', '--sampler=cached'], cwd=here)
    for other_code, other_out, other_err in results:
        assert other_code == 0 and '░' in other_out, other_err
    assert code == 0 and 'a picture of the first text' in out, err
    svg = (here / 'a.svg').read_text()
    assert set(re.findall(r'https?://[^"\s]*', svg)) == {'http://www.w3.org/2000/svg'}
    assert not re.search(r'<script|href|url\(|@import|foreignObject', svg)

    frames = texts_of(svg)
    for said, sampler in (('diffusion', 'confidence'), ('autoregressive', 'autoregressive')):
        shown = [line for head, line in frames if head.startswith(said)]
        written, = loaded.write([text], sampler=sampler, steps=4)
        assert shown[0] == '█' * loaded.net.L
        assert shown[-1].replace(' ', '') == printable(written).replace(' ', '')


def test_a_hostile_text_does_not_break_the_picture():
    ids = torch.tensor([[*b'</text><script>&"\'\x00\x1b', EOS]])
    nowhere = torch.zeros_like(ids).bool()
    frame = SimpleNamespace(tokens=ids, p=torch.ones(ids.shape), is_new=nowhere, is_again=nowhere,
                            step=1)
    start = SimpleNamespace(**{**vars(frame), 'tokens': torch.full_like(ids, MASK), 'step': 0})
    svg = animation(BYTES, MASK, [('a & <b>', [start, frame])], 'is "<i>" \x01& so on')
    assert texts_of(svg)[-1] == ('a & <b>: step 1 of 1', '</text><script>&"\'··')
