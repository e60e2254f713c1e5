""" A text being written is kept as it was written, and shown in a terminal and as an animated picture. """
import contextlib
import re
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
import torch

from corpora.tokenizers import byte_tokenizer
from launch import ROOT, run_each, train_each
from sampling.left_to_right import LeftToRight
from sampling import unmasking
from sampling.animation import MOST_FRAMES, animation, chosen_frames
from sampling.loading import encode, load_run
from sampling.unmasking import Recorder, pieces_of, printable, watcher
from samplers import SAMPLERS, make_propose
from sampling import denoise, directions, drafts

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
    states = []
    z, settings = some_latents(loaded), dict(sampler=name, steps=5, temperature=1.0)
    plain = directions.l2t(loaded, z, **settings)
    directions.l2t(loaded, z, on_step=lambda tokens, *said: states.append(tokens.clone()), **settings)
    recorder = Recorder(loaded.text.mask_id)
    watched = directions.l2t(loaded, z, on_step=recorder, **settings)
    start, *frames = recorder.frames
    assert watched.equal(plain) and len(recorder.frames) == len(states)
    assert (start.tokens == loaded.text.mask_id).all() and frames[-1].tokens.equal(plain)
    assert all(frame.tokens.equal(state) for frame, state in zip(recorder.frames, states))
    assert [frame.step for frame in recorder.frames] == list(range(len(states)))
    assert not start.asked.any() and not start.top_p.any(), 'nothing was said before the first step'


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
                logits, _ = loaded.model(before.tokens, z, loaded.text.time_of_share(share).float(), clocks[1], predict=('text',))
            logits[..., loaded.banned] = -torch.inf
            p = logits.softmax(-1).detach()                              # (B, L, V)
            top = p.topk(4, -1)
            asked = frame.asked
            asked_and_new = asked & frame.is_new
            assert asked.any() and torch.allclose(frame.top_p[asked], top.values[asked], atol=1e-4), name
            of_written = p.gather(-1, frame.tokens.clamp(max=p.shape[-1] - 1)[..., None])[..., 0]
            assert torch.allclose(frame.p[asked_and_new], of_written[asked_and_new], atol=1e-4), name
            stays = ~frame.is_new & (frame.tokens < loaded.text.mask_id)
            assert frame.p[stays].nan_to_num(-1).equal(before.p[stays].nan_to_num(-1)), 'a token that stays keeps its p'


def test_rows_that_a_sampler_leaves_out_are_not_mixed_up(loaded):
    """ cached runs the network on some rows only: p of each token must be its own. """
    found = []
    for name in ('ancestral', 'cached'):
        recorder = Recorder(loaded.text.mask_id)
        directions.l2t(loaded, some_latents(loaded), sampler=name, steps=40, on_step=recorder)
        found.append(recorder.frames[-1])
    assert found[0].tokens.equal(found[1].tokens) and torch.allclose(found[0].p, found[1].p, atol=1e-4)
    assert not found[0].p.isnan().any()


def test_what_is_masked_again_is_known_as_such(loaded):
    recorder = Recorder(loaded.text.mask_id)
    directions.l2t(loaded, some_latents(loaded), sampler='remdm', eta=.5, steps=12, on_step=recorder)
    again = torch.zeros_like(recorder.frames[0].is_again)
    for before, frame in zip(recorder.frames, recorder.frames[1:]):
        again |= (before.tokens != loaded.text.mask_id) & (frame.tokens == loaded.text.mask_id)
        assert frame.is_again.equal(again)
        assert frame.p.isnan().equal(frame.tokens == loaded.text.mask_id), 'a mask has none, and what was written has one'
    assert again.any()


def test_a_batch_begins_where_the_one_before_it_ends(loaded):
    recorder = Recorder(loaded.text.mask_id)
    directions.l2t(loaded, some_latents(loaded, 8), sampler='confidence', steps=3, batch=3, on_step=recorder)
    assert [(frame.first, len(frame.tokens)) for frame in recorder.frames if frame.step == 0] == [(0, 3), (3, 3), (6, 2)]


def test_the_last_step_from_left_to_right_shows_the_padding_that_comes_by_rule():
    text, states = LeftToRight(10, 8), []                                     # EOS 8, PAD 9, MASK 10

    def denoise(tokens, t, positions):
        return torch.nn.functional.one_hot(torch.full((len(tokens),), text.eos), 10).float()
    blank = torch.full((2, 20), text.mask_id)
    tokens = text.left_to_right(denoise, make_propose(0, 1, None), text, blank, blank < 0, 0, None,
                                lambda x, *said: states.append(x.clone()))
    assert len(states) == 8 and states[-1].equal(tokens) and tokens.tolist() == [[8] + [9] * 19] * 2


def test_pieces_are_the_text_cut_where_its_tokens_are():
    text = 'né 日本 🙂!'
    ids = BYTES.encode(text)
    pieces = pieces_of(BYTES, [*ids, EOS, PAD], MASK)
    assert len(pieces) == len(ids) and ''.join(pieces) == text
    assert pieces_of(BYTES, [*ids, EOS, PAD], MASK, to_end=True)[len(ids):] == ['EOS', 'PAD']
    assert ''.join(pieces_of(BYTES, [ids[0], MASK, *ids[1:3]], MASK)) == 'n░é'
    assert ''.join(pieces_of(BYTES, [ids[1], MASK], MASK)) == '\ufffd░', 'a character that a mask cuts'


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
    assert 'writes · step 0 · 32 of 32 masked' in frames[0] and 'writes · step 4 · 0 of 32 masked' in frames[-1]

    # a shade for each kind of token: p below a half, above, above .9; new, again, draft
    frame = SimpleNamespace(tokens=torch.tensor([[*b'abcd', MASK, MASK, EOS]]), p=torch.tensor([[.2, .6, .95, *[torch.nan] * 4]]),
                            is_new=torch.tensor([[0, 1, 0, 0, 0, 0, 0]]).bool(), is_again=torch.tensor([[0, 0, 1, 0, 0, 0, 0]]).bool(),
                            asked=torch.tensor([[0, 0, 0, 0, 1, 0, 0]]).bool(), top_ids=torch.full((1, 7, 2), ord('z')),
                            top_p=torch.full((1, 7, 2), .5))
    def shown():
        spans = unmasking.spans_of(BYTES, frame, 0, MASK)
        return [unmasking.coloured(*span) for span in unmasking.with_drafts(BYTES, spans, frame, 0, MASK)]
    assert shown() == ['\x1b[2ma\x1b[0m', '\x1b[36mb\x1b[0m', '\x1b[1;35mc\x1b[0m', 'd', '\x1b[2;3mz\x1b[0m', '\x1b[2m░\x1b[0m']
    for end in (EOS, PAD):
        frame.top_ids[...] = end
        assert shown()[4] == '\x1b[2m░\x1b[0m', 'no text is expected there'


@pytest.mark.parametrize('is_terminal, no_color', [(False, ''), (True, '1')])
def test_elsewhere_and_with_NO_COLOR_the_first_text_is_plain_lines(loaded, monkeypatch, capsys, is_terminal, no_color):
    monkeypatch.setenv('NO_COLOR', no_color)
    recorder, out = watch(loaded, monkeypatch, capsys, is_terminal, K=1, steps=4)
    assert '\x1b' not in out and out.count('\n') == recorder.frames[-1].step == 4
    ids = recorder.frames[-1].tokens[0]
    assert out.splitlines()[-1] == printable(loaded.tokenizer.decode(ids))


@pytest.mark.parametrize('batch', [128, 2])
def test_a_progress_bar_counts_every_row_where_a_call_reads_fewer(loaded, monkeypatch, batch):
    bars = []

    class Bar(contextlib.nullcontext):
        def __init__(self, total, disable, **how):
            self.n, self.total, self.is_hidden = 0, total, bool(disable)
            bars.append(self)

        def __enter__(self):
            return self

        def update(self, n):
            self.n += n
    monkeypatch.setattr(denoise, 'progress_bar', Bar)
    z, tokens = some_latents(loaded), torch.full((3, loaded.L), 5)
    quick = dict(batch=batch, steps=2, latent_steps=2)
    directions.l2t(loaded, z, sampler='ancestral', **quick)
    directions.t2l(loaded, tokens, **quick)
    directions.unconditional(loaded, 3, **quick)
    directions.embed(loaded, tokens, z, batch=batch)
    assert [(bar.n, bar.total, bar.is_hidden) for bar in bars] == [(3, 3, batch > 3)] * 4
    directions.l2t(loaded, z, on_step=Recorder(loaded.text.mask_id), **quick)
    assert bars[-1].is_hidden, 'what is watched moves by itself'


def texts_of(svg):
    """ [(what is said above, text)] of each frame of a picture. """
    found = []
    for group in ET.fromstring(svg).iter('{http://www.w3.org/2000/svg}g'):
        said, *lines = [''.join(text.itertext()) for text in group.iter('{http://www.w3.org/2000/svg}text')]
        found.append((said, ''.join(lines)))
    return found


def test_the_picture_has_every_frame_of_both_ways_and_asks_for_nothing(both, loaded, dataset, tmp_path):
    text, path = 'a red dog runs near the river', tmp_path / 'a.svg'
    here = ['sample.py', f'--out_dir={both}', '--device=cpu', '--dtype=float32', f'--text={text}', '--steps=4']
    others = ['sample.py', f'--out_dir={both}', '--device=cpu', '--watch=true', f'--svg={tmp_path}/b.svg', '--steps=3']
    (code, out, err), *results = run_each(
        [*here, f'--svg={path}'], [*others, '--mode=unconditional'], [*others, '--mode=infill', '--text=a red [MASK:3] near the river'],
        [*others, '--mode=text', '--sampler=cached'], [*here, f'--svg={tmp_path}/no/a.svg'],
        [*here, f'--svg={path}', '--mode=embed', f'--save={tmp_path}/a.npy'])
    for other_code, other_out, other_err in results[:3]:
        assert other_code == 0 and '░' in other_out, other_err
    wrong = results[3:]
    assert code == 0 and 'a picture of the first text' in out, err
    assert [code for code, _, _ in wrong] == [2, 2] and 'no such folder' in wrong[0][2] and 'does not read it' in wrong[1][2]
    svg = path.read_text()
    assert len(svg) < 60_000 and set(re.findall(r'https?://[^"\s]*', svg)) == {'http://www.w3.org/2000/svg'}
    assert not re.search(r'<script|href|url\(|@import|foreignObject', svg)

    frames = texts_of(svg)
    diffusion = [text for said, text in frames if said.startswith('diffusion')]
    causal = [text for said, text in frames if said.startswith('autoregressive')]
    assert len(diffusion) == 5 and diffusion[0] == '█' * loaded.L and causal[0] == '█' * loaded.L
    z = loaded.stats.standardise(encode(loaded, [text]))
    for written, sampler in ((diffusion, 'confidence'), (causal, 'autoregressive')):
        tokens = directions.l2t(loaded, z, sampler=sampler, steps=4)
        expected = printable(loaded.tokenizer.decode(tokens[0]))
        assert written[-1].replace(' ', '') == expected.replace(' ', ''), 'a line that is cut loses its first space'


def test_the_picture_in_the_docs_shows_one_sentence_written_both_ways():
    svg = (ROOT / 'docs/both_ways.svg').read_text()
    last = [text for said, text in texts_of(svg) if re.search(r'step (\d+) of \1$', said)]
    assert len(svg) < 60_000 and len(last) == 2 and '(both_ways.svg)' in (ROOT / 'docs/sampling.md').read_text()
    assert all(text in svg.split('</title>')[0] for text in last), 'of the docs: both write the sentence itself'


def test_a_hostile_text_does_not_break_the_picture_and_a_long_one_has_few_frames():
    ids = torch.tensor([[*b'</text><script>&"\'\x00\x1b', EOS]])
    blank = torch.zeros_like(ids)
    frame = SimpleNamespace(tokens=ids, p=torch.ones(ids.shape), is_new=blank.bool(), is_again=blank.bool(), step=1)
    start = SimpleNamespace(**{**vars(frame), 'tokens': torch.full_like(ids, MASK), 'step': 0})
    svg = animation(BYTES, MASK, [('a & <b>', [start, frame])], 'is "<i>" \x01& so on')
    assert texts_of(svg)[-1] == ('a & <b>: step 1 of 1', '</text><script>&"\'··')
    for n in (1, 2, 64, 65, 66, 1000):
        chosen = chosen_frames(list(range(n + 1)))
        assert chosen[0] == 0 and chosen[-1] == n and len(chosen) <= MOST_FRAMES + 1 and len(set(chosen)) == len(chosen)
        assert n > MOST_FRAMES or chosen == list(range(n + 1))
