"""
No figure of README.md or docs/ is stale: it is the one in results/, rounded, or its section says at which commit it was measured.

    README.md    the tables are those that benchmarks/tables.py prints of results/, the quickstart's summary is that of its results
    docs/        a section with figures stands in SECTIONS, and then each figure of its tables, and each with a point in its text, is in
                 the files of results/ that are named there; or in ONE_OFFS, and then it names a commit, or says that the figures are
                 computed; or in NO_FIGURES
    config/      every figure with a point in the header of a config is in the file of its name
"""
import ast
import io
import json
import re
from contextlib import redirect_stdout
from functools import lru_cache
from statistics import mean, median, stdev

import pytest

import evaluate
from benchmarks import tables
from launch import ROOT

README = (ROOT / 'README.md').read_text()
NUMBER = re.compile(r'(?<![\w.,/-])-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?![\w.]*[A-Za-z\d])')


@lru_cache
def results(name):
    return json.loads((ROOT / f'results/{name}.json').read_text())


def numbers(text):
    """ The numbers of a text, as they are written, without those in `code`, and without the targets of links. """
    text = re.sub(r'`[^`]*`|\]\([^)]*\)', ' ', text)
    return [found for found in NUMBER.findall(text) if re.search(r'\d', found)]


def is_rounded(written, value):
    """ Whether a number is what a value is when it is rounded to the number's digits. """
    digits = len(written.partition('.')[2])
    return abs(float(written.replace(',', '')) - value) <= .5 * 10 ** -digits * (1 + 1e-6)


# ---- what has to be computed from results/

def over_seeds(runs, key):
    """ (mean, its standard error) over the seeds of a list of runs. """
    values = [run[key] for run in runs]
    return mean(values), stdev(values) / len(values) ** .5


def shares(mode, weight, shift, key):
    found = [run for run in results('multi30k_shares')['runs'] if (run['mode'], run['causal_weight'], run['shift']) == (mode, weight, shift)]
    assert len(found) == 3
    return over_seeds(found, key)


def twice_the_steps(key):
    return over_seeds(results('multi30k_shares')['twice_the_steps']['runs'], key)


def ablation(variant, key='perplexity'):
    return over_seeds(results('multi30k_atat_ablation')['runs'][variant], key)


def ablation_difference(variant):
    runs = results('multi30k_atat_ablation')['runs']
    differences = [dict(d=run['perplexity'] - plain['perplexity']) for run, plain in zip(runs[variant], runs['uniform'])]
    return over_seeds(differences, 'd')


# ---- README.md

def printed(function, *args):
    """ The lines that a function prints. """
    out = io.StringIO()
    with redirect_stdout(out):
        function(*args)
    return out.getvalue().splitlines()


def test_the_tables_of_the_readme_are_those_that_are_printed_of_results():
    known = set(printed(tables.directions, 'captions_seed0', 'captions_seed1')) | set(printed(tables.ways))
    text = README.split('\n## Results\n')[1].split('\n## ')[0]
    rows = [line.replace('**', '') for line in text.splitlines() if line.startswith('| ') and re.search(r'\d \||\d\.\d', line)]
    assert len(rows) >= 9 and not [row for row in rows if row not in known]


def test_the_summary_of_the_quickstart_is_that_of_results():
    found, known = results('quickstart_seed0'), evaluate.all_tasks()
    names = 'nelbo', 'l2t', 't2l', 'infill', 'unconditional'
    measured = {name: {key.partition('/')[2]: value for key, value in found.items() if key.startswith(f'{name}/')} for name in names}
    lines = [line.rstrip() for line in printed(evaluate.print_summary, {name: known[name] for name in names}, measured) if line]
    shown = README[README.index('\nin short '):].split('\n```')[0].strip().splitlines()
    assert len(shown) > 8 and shown == lines


def table_rows(text):
    """ [(first cell, other cells)] of the tables of a text, without their heads. """
    lines = [line for line in text.splitlines() if line.startswith('|')]
    heads = {i for i, line in enumerate(lines[1:]) if re.fullmatch(r'[|:\- ]+', line)}
    cells = [re.split(r'(?<!\\)\|', line.strip().strip('|')) for i, line in enumerate(lines) if i not in heads and not re.fullmatch(r'[|:\- ]+', line)]
    return [(first.strip(), [cell.strip() for cell in others]) for first, *others in cells]


# ---- docs/

# the files of results/ that hold all figures of a section, but those that follow
SECTIONS = {
    'adaptive.md': {'Is the learned importance right?': ('multi30k_atat',), 'Does it lower the plain bound?': ('multi30k_atat_ablation',)},
    'baselines.md': {'Text alone': ('multi30k_baselines',)},
    'both_ways.md': {'The bag begins in closed form': ('multi30k_bag',), 'Which share, which weight': ('multi30k_shares',),
                     'What a mode needs comes with the mode': ('multi30k_t2l_lengths',),
                     'Drafts': ('captions_seed0', 'captions_decoder')},
    'diffusion.md': {'Change a text by an embedding': ('captions_seed0', 'captions_seed1'), 'Fill gaps, both sides known': ('captions_seed0', 'captions_seed1'),
                     'Fill a grid, whichever cells are given': ('sudoku',)},
    'images.md': {'Images and captions': ('image_text',)},
    'peers.md': {'nanoGPT, on its own characters': ('nanogpt',), "MDLM's network and loss, on captions": ('mdlm',)},
    'proteins.md': {'Measured': ('protein_tiny',)},
    'results.md': {'Quickstart': ('quickstart_seed0', 'quickstart_seed1', 'quickstart_seed2'), 'Likelihoods of orders': ('quickstart_orders',),
                   'Captions from their MiniLM embeddings': ('captions_seed0',),
                   'How much a network reads from one embedding': ('lengths',),
                   'The square of clocks, its edges, its diagonal': ('clocks',),
                   'Captions from elsewhere': ('captions_elsewhere', 'captions_seed0', 'lengths'),
                   'Masked rows alone': ('multi30k_l2t_masked',),
                   'Every direction from one checkpoint': ('multi30k_mixed_alone',)},
    'sampling.md': {'Samplers by network calls': ('multi30k_l2t_masked', 'multi30k_samplers_1000')},
    'speed.md': {'A training step beside other libraries': ('bench-step-small',),
                 'Writing a text': ('writing',), 'Muon and AdamW': ('muon_adamw',)},
    'speedrun.md': {'The records': ('speedrun',)},
}
# figures of these sections that results/ does not keep: sizes and counts of what was run, times, and differences
BESIDE = {
    'Which share, which weight': ['.067', '.478', '.316', '1.912', '2.456', '2.207', '2512.14549', '2410.24159'],
    'The bag begins in closed form': ['400', '0', '1', '612', '1,500'],
    'Text alone': ['89.0', '96.4', '.001'],                       # perplexities, of multi30k_atat_ablation; a knob
    'Images and captions': ['2.5'],
    'Captions from their MiniLM embeddings': ['4.4', '14.1'],
    'Every direction from one checkpoint': ['1,500', '256'],              # pairs, texts
    'Captions from elsewhere': ['.8'],                                    # a Jaccard index
    'Fill a grid, whichever cells are given': ['60.5', '45.5', '70.5', '91.5'],     # of a one-off
    'The records': ['64', '96', '24', '960', '581', '567', '19.7', '9.1', '5.0', '.454', '.226', '.249', '2.17', '4.17', '1', '4', '3',
                                  '0.3', '0.1', '6', '1,200', '2,400', '2,600', '2026-11-21', '2026-11-23', '.058', '.005', '.014'],
    'A training step beside other libraries': ['8.5', '1.45'],
    'Change a text by an embedding': ['94.1', '49.2', '0.7'],         # of a decoder alone, in LOG.md
    'Muon and AdamW': ['.76'],
    'nanoGPT, on its own characters': ['1.88', '.5'],
}
# measured once, or computed: the section says at which commit, or how
ONE_OFFS = {
    'both_ways.md': ['Texts that are too short'],
    'data.md': ['How many texts are enough'],
    'peers.md': ['Beside other repositories'],
    'reproduction.md': ['Tokens, hours, memory', 'How the hours are computed'],
    'speed.md': ['bfloat16 or float32'],
}
SAYS_WHERE_FROM = re.compile(r'commit `?[0-9a-f]{7}|commits [0-9a-f]{7}|computed|was measured|at the commit in the table|commit of a row')
# what a table says of programs, and figures of the examples, which tests/test_examples.py has
NO_FIGURES = {
    'baselines.md': ['Baselines'], 'cluster.md': ['Checkpoints', 'Exit codes'],
    'data.md': ['Encoders', 'The dataset on disk'], 'examples.md': ['Examples: one idea each'],
    'sampling.md': ['Text samplers'],
    'troubleshooting.md': ['At the start', 'The loss', 'Many processes', 'The disk', 'Speed'],
}


def leaves(found):
    """ The numbers in what a file of results/ holds. """
    if isinstance(found, dict):
        for key, value in found.items():
            if key != 'meta':
                yield from leaves(value)
    elif isinstance(found, list):
        for value in found:
            yield from leaves(value)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield found


def computed(name):
    """ What a page computes from a file of results/: means over seeds, medians over rounds, other units. """
    if name == 'multi30k_shares':
        for arm in (('l2t+7*causal', 1.5, True), ('l2t', 1.0, False), ('causal', 1.0, False), ('l2t+causal', 2.0, True)):
            for key in ('val_text', 'val_causal'):
                if key == 'val_text' and arm[0] == 'causal' or key == 'val_causal' and arm[0] == 'l2t':
                    continue
                yield from shares(*arm, key)
        for key in ('val_text', 'val_causal'):
            yield from twice_the_steps(key)
    if name == 'multi30k_atat_ablation':
        for variant in results(name)['runs']:
            yield from [*ablation(variant), *ablation(variant, 'nats'), *ablation_difference(variant)]
    if name == 'clocks':
        for runs in results(name)['runs'].values():
            for key in runs[0].keys() - {'seed'}:
                yield from over_seeds(runs, key)
    if name == 'sudoku':
        runs = results(name)['runs']
        for key in runs[0].keys() - {'seed'}:
            yield from over_seeds(runs, key)
    if name.startswith('bench-step'):
        for row in results(name)['rows']:
            yield from (row['flops'] / 1e9, row['utilisation'] * 100)


def sections(name):
    """ [(heading, its lines)] of a page, without fenced blocks. """
    text = re.sub(r'^```.*?^```$', '', (ROOT / 'docs' / name).read_text(), flags=re.S | re.M)
    parts = re.split(r'^#+ (.*)$', text, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2]))


PAGES = sorted(path.name for path in (ROOT / 'docs').glob('*.md'))


@pytest.mark.parametrize('name', PAGES)
def test_every_table_of_a_page_says_where_its_figures_come_from(name):
    known = {*SECTIONS.get(name, ()), *ONE_OFFS.get(name, ()), *NO_FIGURES.get(name, ())}
    found = {heading for heading, text in sections(name) if any(numbers(cell) for _, cells in table_rows(text) for cell in cells)}
    assert found <= known, f'docs/{name}: a table with figures that no list of this test has: {found - known}'
    assert known <= {heading for heading, _ in sections(name)}, f'docs/{name} has no {known}'
    page = (ROOT / 'docs' / name).read_text()
    for heading, text in sections(name):
        if heading in ONE_OFFS.get(name, ()):
            assert SAYS_WHERE_FROM.search(' '.join(text.split())) or 'Nothing on this page was measured' in ' '.join(page.replace('*', '').split()), (name, heading)


@pytest.mark.parametrize('name', SECTIONS)
def test_the_figures_of_a_section_are_in_results(name):
    wrong = []
    for heading, text in sections(name):
        if heading not in SECTIONS[name]:
            continue
        files = SECTIONS[name][heading]
        values = [value for file in files for value in (*leaves(results(file)), *computed(file))]
        prose = '\n'.join(line for line in text.splitlines() if not line.startswith('|'))
        figures = [number for number in numbers(prose) if '.' in number]
        figures += [number for _, cells in table_rows(text) for cell in cells for number in numbers(cell)]
        for written in figures:
            is_known = written in BESIDE.get(heading, ()) or any(is_rounded(written, value) for value in values)
            wrong += [] if is_known else [f'docs/{name}, {heading}: {written} is not in {", ".join(files)}']
    assert not wrong, '\n'.join(wrong)


def cells_over_seeds(runs, keys, digits):
    return [' ± '.join(f'{value:.{n}f}' for value in over_seeds(runs, key)) for key, n in zip(keys, digits)]


def test_each_row_of_the_tables_of_sudoku_and_clocks_is_of_its_own_name():
    runs = results('sudoku')['runs']
    rows = {name: cells for name, cells in table_rows(dict(sections('diffusion.md'))['Fill a grid, whichever cells are given'])}
    assert rows == {name: cells_over_seeds(runs, [f'{name}/{clues}' for clues in (6, 12, 18, 24)], [1] * 4)
                    for name in sorted({key.rpartition('/')[0] for key in runs[0]} - {''})}

    keys = 'nelbo/nats_per_token', 'nelbo/null/nats_per_token', 'l2t/bleu', 't2l/centred_cosine'
    rows = dict(table_rows(dict(sections('results.md'))['The square of clocks, its edges, its diagonal']))
    ways = {'the whole square (`unconditional`)': 'square', 'two edges (`l2t`, `t2l`)': 'edges', 'a third of each': 'recipe', 'the diagonal: one clock for both': 'equal'}
    assert rows == {label: cells_over_seeds(results('clocks')['runs'][way], keys, (3, 3, 1, 3)) for label, way in ways.items()}


def test_each_row_of_the_table_of_lengths_is_of_its_own_length():
    def cell(group, key):
        return f'{group[key]:.1f} ± {group[f"{key}_se"]:.1f}'
    columns = [(name, key) for name, keys in (('all-MiniLM-L6-v2', ('read', 'unread', 'exact', 'bleu')), ('all-MiniLM-L6-v2, other texts', ('exact', 'bleu')), ('lsa', ('read', 'unread')))
               for key in keys]
    groups = {name: {f'{group["from"]} to {group["to"]}': group for group in found} for name, found in results('lengths').items()}
    rows = dict(table_rows(dict(sections('results.md'))['How much a network reads from one embedding']))
    expected = {label: [cell(groups[name][label], key) if label in groups[name] else '' for name, key in columns] for label in rows}
    assert rows == expected and set(rows) == {label for found in groups.values() for label in found}


def test_the_time_ratios_of_the_speedrun_are_the_medians_and_ends_of_the_rounds():
    page = (ROOT / 'docs/speedrun.md').read_text()
    for entry, others, commit in (('fourth', 'fifth', 'dd4554f'), ('fifth', 'fourth', '3faba36')):
        found = results('speedrun')[f'{entry} entry'][f'time ratio, twelve rounds, six of them measured with the {others} entry']
        ratios = found['by round, sorted']
        row, = [line for line in page.splitlines() if line.startswith('| 2026-') and commit in line]
        written = re.search(r'\| \**([\d.]+)\** \(([\d.]+) to ([\d.]+)\)', row).groups()
        assert found['median'] == median(ratios)
        assert all(map(is_rounded, written, (median(ratios), ratios[0], ratios[-1]))), (written, ratios)


# ---- config/

# configs whose header has figures: the file of results/ that they are in, and what it does not keep: minutes
HEADERS = {'image_text': ['7.5'], 'speedrun': []}


def test_the_figures_in_the_header_of_a_config_are_in_results():
    headers = {path.stem: ast.get_docstring(ast.parse(path.read_text())) for path in (ROOT / 'config').glob('*.py')}
    assert {name for name, header in headers.items() if 'commit' in header} == set(HEADERS)
    for name, beside in HEADERS.items():
        paragraph, = [part for part in headers[name].split('\n\n') if 'commit' in part]
        values = list(leaves(results(name)))
        figures = [number for number in numbers(paragraph) if '.' in number and number not in beside]
        assert len(figures) >= 2, (name, figures)
        assert not [number for number in figures if not any(is_rounded(number, value) for value in values)], name
