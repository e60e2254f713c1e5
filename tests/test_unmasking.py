""" A text being written is kept as it was written, and shown in a terminal and as an animated
picture. """
import re
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
import torch

from corpora.tokenizers import byte_tokenizer
from launch import run_each, train_each
from sampling import unmasking
from sampling.animation import MOST_STEPS, animation, chosen_frames
from sampling.loading import encode, load_run
from sampling.unmasking import Recorder, pieces_of, printable, watcher
from samplers import SAMPLERS
from sampling import directions, drafts

BYTES = byte_tokenizer()
MASK, EOS, PAD = BYTES.vocab_size, BYTES.eos, BYTES.pad


@pytest.fixture(scope='module')
def both(dataset, tmp_path_factory):
    """ A short run that has learned both ways of writing, and joint samples. """
    out = tmp_path_factory.mktemp('runs') / 'both'
    train_each(dataset, {out: ['--mode=unconditional+l2t+causal', '--max_iters=4']})
    return out


@pytest.fixture(scope='module')
def loaded(both):
    return load_run(both, device='cpu', dtype='float32')


def some_latents(run, n=3):
    return torch.randn(n, *run.meta['latent_shape'], generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('name', ['autoregressive', *SAMPLERS])
def test_a_recorder_changes_no_id_and_has_every_state(loaded, name):
    z, settings = some_latents(loaded), dict(sampler=name, steps=5, temperature=1.0)
    plain = directions.l2t(loaded, z, **settings)
    recorder = Recorder(loaded.text.mask_id)
    assert directions.l2t(loaded, z, on_step=recorder, **settings).equal(plain)
    start, *frames = recorder.frames
    assert (start.tokens == loaded.text.mask_id).all() and frames[-1].tokens.equal(plain)
    assert [frame.step for frame in frames] == list(range(1, len(frames) + 1))
    assert not start.asked.any() and not start.top_p.any(), 'nothing was said before'


def test_probabilities_are_those_of_the_network_in_the_state_before_the_step(loaded):
    z = some_latents(loaded)
    for name in ('confidence', 'first_hitting', 'autoregressive'):
        recorder = Recorder(loaded.text.mask_id, n_top=4)
        directions.l2t(loaded, z, sampler=name, steps=6, temperature=1.0, on_step=recorder)
        for before, frame in zip(recorder.frames, recorder.frames[1:]):
            clocks = torch.zeros(3), torch.zeros(3)
            if name == 'autoregressive':
                logits, _ = loaded.model(before.tokens, z, *clocks, predict=('text',), n_causal=3)
            else:
                share = (before.tokens == loaded.text.mask_id).double().mean(1)
                logits, _ = loaded.model(before.tokens, z, loaded.text.time_of_share(share).float(),
                                         clocks[1], predict=('text',))
            logits[..., loaded.banned] = -torch.inf
            p = logits.softmax(-1).detach()                              # (B, L, V)
            top = p.topk(4, -1)
            asked = frame.asked
            asked_and_new = asked & frame.is_new
            assert asked.any() and torch.allclose(frame.top_p[asked], top.values[asked],
                                                  atol=1e-4), name
            of_written = p.gather(-1, frame.tokens.clamp(max=p.shape[-1] - 1)[..., None])[..., 0]
            assert torch.allclose(frame.p[asked_and_new], of_written[asked_and_new],
                                  atol=1e-4), name
            stays = ~frame.is_new & (frame.tokens < loaded.text.mask_id)
            kept, earlier = (of.p[stays].nan_to_num(-1) for of in (frame, before))
            assert kept.equal(earlier)


def test_what_is_masked_again_is_known_as_such(loaded):
    recorder = Recorder(loaded.text.mask_id)
    directions.l2t(loaded, some_latents(loaded), sampler='remdm', eta=.5, steps=12,
                   on_step=recorder)
    again = torch.zeros_like(recorder.frames[0].is_again)
    for before, frame in zip(recorder.frames, recorder.frames[1:]):
        again |= (before.tokens != loaded.text.mask_id) & (frame.tokens == loaded.text.mask_id)
        assert frame.is_again.equal(again)
        assert frame.p.isnan().equal(frame.tokens == loaded.text.mask_id)
    assert again.any()


def test_pieces_are_the_text_cut_where_its_tokens_are():
    text = 'né 日本 🙂!'
    ids = BYTES.encode(text)
    pieces = pieces_of(BYTES, [*ids, EOS, PAD], MASK)
    assert len(pieces) == len(ids) and ''.join(pieces) == text
    assert pieces_of(BYTES, [*ids, EOS, PAD], MASK, to_end=True)[len(ids):] == ['EOS', 'PAD']
    assert ''.join(pieces_of(BYTES, [ids[0], MASK, *ids[1:3]], MASK)) == 'n░é'
    cut = pieces_of(BYTES, [ids[1], MASK], MASK)
    assert ''.join(cut) == '\ufffd░', 'a character that a mask cuts'


def test_no_control_character_reaches_the_terminal():
    hostile = 'a\x1b[2J\r\x07\x9b31m\u202e\nb'
    shown = ''.join(pieces_of(BYTES, BYTES.encode(hostile), MASK))
    assert shown == printable(hostile) and shown.isprintable() and shown[0] + shown[-1] == 'ab'


def watch(run, monkeypatch, capsys, is_terminal, **knobs):
    monkeypatch.setattr(unmasking, 'PAUSE', 0)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal, raising=False)
    recorder = watcher(run, 2)
    raw = some_latents(run, 2)
    monkeypatch.setattr(drafts, 'encode', lambda run, texts: some_latents(run, len(texts)))
    drafts.nearest_of(run, raw, sampler='confidence', on_step=recorder, **knobs)
    return recorder, capsys.readouterr().out


def test_a_terminal_shows_drafts_and_shades_in_place(loaded, monkeypatch, capsys):
    monkeypatch.delenv('NO_COLOR', raising=False)
    recorder, out = watch(loaded, monkeypatch, capsys, True, K=2, steps=4)
    frames = out.split('\x1b[J')
    assert len(frames) == 5 and all(frame.startswith('\x1b[') for frame in frames[1:])
    assert 'writes · step 0 · 32 of 32 masked' in frames[0]
    assert 'writes · step 4 · 0 of 32 masked' in frames[-1]

    # a shade for each kind of token: p below a half, above, above .9; new, again, draft
    frame = SimpleNamespace(tokens=torch.tensor([[*b'abcd', MASK, MASK, EOS]]),
                            p=torch.tensor([[.2, .6, .95, *[torch.nan] * 4]]),
                            is_new=torch.tensor([[0, 1, 0, 0, 0, 0, 0]]).bool(),
                            is_again=torch.tensor([[0, 0, 1, 0, 0, 0, 0]]).bool(),
                            asked=torch.tensor([[0, 0, 0, 0, 1, 0, 0]]).bool(),
                            top_ids=torch.full((1, 7, 2), ord('z')),
                            top_p=torch.full((1, 7, 2), .5))
    def shown():
        spans = unmasking.spans_of(BYTES, frame, 0, MASK, least_draft=.1)
        return [unmasking.coloured(*span) for span in spans]
    assert shown() == ['\x1b[2ma\x1b[0m', '\x1b[36mb\x1b[0m', '\x1b[1;35mc\x1b[0m', 'd',
                       '\x1b[2;3mz\x1b[0m', '\x1b[2m░\x1b[0m']
    for end in (EOS, PAD):
        frame.top_ids[...] = end
        assert shown()[4] == '\x1b[2m░\x1b[0m', 'no text is expected there'


@pytest.mark.parametrize('is_terminal, no_color', [(False, ''), (True, '1')])
def test_elsewhere_and_with_NO_COLOR_the_first_text_is_plain_lines(
        loaded, monkeypatch, capsys, is_terminal, no_color):
    monkeypatch.setenv('NO_COLOR', no_color)
    recorder, out = watch(loaded, monkeypatch, capsys, is_terminal, K=1, steps=4)
    assert '\x1b' not in out and out.count('\n') == recorder.frames[-1].step == 4
    ids = recorder.frames[-1].tokens[0]
    assert out.splitlines()[-1] == printable(loaded.tokenizer.decode(ids))


def texts_of(svg):
    """ [(what is said above, text)] of each frame of a picture. """
    found = []
    for group in ET.fromstring(svg).iter('{http://www.w3.org/2000/svg}g'):
        said, *lines = [''.join(text.itertext())
                        for text in group.iter('{http://www.w3.org/2000/svg}text')]
        found.append((said, ''.join(lines)))
    return found


def test_the_picture_has_every_frame_of_both_ways_and_asks_for_nothing(
        both, loaded, dataset, tmp_path):
    text, path = 'a red dog runs near the river', tmp_path / 'a.svg'
    here = ['sample.py', f'--out_dir={both}', '--device=cpu', '--dtype=float32', f'--text={text}',
            '--steps=4']
    others = ['sample.py', f'--out_dir={both}', '--device=cpu', '--watch=true',
              f'--svg={tmp_path}/b.svg', '--steps=3']
    (code, out, err), *results = run_each(
        [*here, f'--svg={path}'], [*others, '--mode=unconditional'],
        [*others, '--mode=infill', '--text=a red [MASK:3] near the river'],
        [*others, '--mode=text', '--sampler=cached'], [*here, f'--svg={tmp_path}/no/a.svg'],
        [*here, f'--svg={path}', '--mode=embed', f'--save={tmp_path}/a.npy'])
    for other_code, other_out, other_err in results[:3]:
        assert other_code == 0 and '░' in other_out, other_err
    wrong = results[3:]
    assert code == 0 and 'a picture of the first text' in out, err
    assert [code for code, _, _ in wrong] == [2, 2] and 'no such folder' in wrong[0][2]
    assert 'does not read it' in wrong[1][2]
    svg = path.read_text()
    assert len(svg) < 60_000
    assert set(re.findall(r'https?://[^"\s]*', svg)) == {'http://www.w3.org/2000/svg'}
    assert not re.search(r'<script|href|url\(|@import|foreignObject', svg)

    frames = texts_of(svg)
    diffusion = [text for said, text in frames if said.startswith('diffusion')]
    causal = [text for said, text in frames if said.startswith('autoregressive')]
    assert len(diffusion) == 5 and diffusion[0] == causal[0] == '█' * loaded.L
    z = loaded.stats.standardise(encode(loaded, [text]))
    for written, sampler in ((diffusion, 'confidence'), (causal, 'autoregressive')):
        tokens = directions.l2t(loaded, z, sampler=sampler, steps=4)
        expected = printable(loaded.tokenizer.decode(tokens[0]))
        # a line that is cut loses its first space
        assert written[-1].replace(' ', '') == expected.replace(' ', '')


def test_a_hostile_text_does_not_break_the_picture_and_a_long_one_has_few_frames():
    ids = torch.tensor([[*b'</text><script>&"\'\x00\x1b', EOS]])
    blank = torch.zeros_like(ids)
    frame = SimpleNamespace(tokens=ids, p=torch.ones(ids.shape), is_new=blank.bool(),
                            is_again=blank.bool(), step=1)
    start = SimpleNamespace(**{**vars(frame), 'tokens': torch.full_like(ids, MASK), 'step': 0})
    svg = animation(BYTES, MASK, [('a & <b>', [start, frame])], 'is "<i>" \x01& so on')
    assert texts_of(svg)[-1] == ('a & <b>: step 1 of 1', '</text><script>&"\'··')
    for n in (1, 2, 64, 65, 66, 1000):
        chosen = chosen_frames(list(range(n + 1)), MOST_STEPS)
        assert chosen[0] == 0 and chosen[-1] == n and len(chosen) <= MOST_STEPS + 1
        assert len(set(chosen)) == len(chosen)
        assert n > MOST_STEPS or chosen == list(range(n + 1))
