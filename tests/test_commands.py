"""
Every command of README.md, docs/ and config/ is one that a reader can type: its script, its config files and its knobs are there, and
it runs.

Two commands with the same words are one. They run in one folder of small files, in the order prepare, train, export, sample,
evaluate, plot. A command runs as it is written, with the knobs of `small` behind it, and the last one wins: a tiny network, few
texts, `lsa` in place of an encoder of the hub, one process in place of torchrun's. ELSEWHERE and NOT_RUN hold the others.
"""
import ast
import gzip
import json
import re
import shlex
import shutil
from collections import namedtuple

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

from configurator import SCRIPTS, read_knobs
from launch import ROOT, run_code, run_each
from prepare import OF_SAME_AS
from runs.stages import modes_of, read_schedule

PAGES = ['README.md', *sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'docs').glob('*.md'))]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'config').glob('*.py'))
HEADERS = sorted(str(path.relative_to(ROOT)) for folder in ('.', 'runs', 'processes', 'benchmarks', 'examples') for path in (ROOT / folder).glob('*.py'))

# where: file:line; line: as it is written, without its comment; script: None for another program; args: what the script is given
Command = namedtuple('Command', 'where line script args')

# run by another test: what a command begins with, and that test
ELSEWHERE = {
    'python sample.py --out_dir=weights/captions': 'test_weights.py::test_ten_captions_come_back_beside_their_sources',
    'python examples/why_one_over_t.py': 'test_examples.py::test_one_over_t_counts_each_step_once_and_other_weights_fall_below_the_entropy',
    'python evaluate.py config/image_text.py': 'test_image.py::made',
    'python plot.py config/image_text.py --what=images': 'test_image.py::made',
    'python bench.py --what=step': 'test_bench.py::test_step_compares_what_is_there_and_names_what_is_not',
    'python bench.py --what=trainings': 'test_bench.py::test_trainings_take_turns_and_an_unknown_bench_is_refused',
    'python sample.py --text="Return a list." --sampler=leftmost':
        'test_extending.py::test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation',
    'python evaluate.py --tasks=l2t --n=100 --sampler=leftmost':
        'test_extending.py::test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation',
    'python train.py config/quickstart.py --text_process=early':
        'test_extending.py::test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation',
    'python evaluate.py --out_dir=out/early':
        'test_extending.py::test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation',
    'python evaluate.py --tasks=length,nelbo':
        'test_extending.py::test_a_sampler_a_text_process_and_a_task_of_the_page_work_in_training_sampling_and_evaluation',
    'python prepare.py --input=sounds': 'test_extending.py::test_the_modality_of_the_page_goes_from_files_to_a_trained_model',
    'python train.py config/quickstart.py --text_loss_weight=root':
        'test_extending.py::test_the_loss_weighting_and_the_block_of_the_page_train_and_are_used',
    'python evaluate.py --out_dir=out/root':
        'test_extending.py::test_the_loss_weighting_and_the_block_of_the_page_train_and_are_used',
    'python train.py --dataset=sounds': 'test_extending.py::test_the_modality_of_the_page_goes_from_files_to_a_trained_model',
    'python evaluate.py --out_dir=out/sounds': 'test_extending.py::test_the_modality_of_the_page_goes_from_files_to_a_trained_model',
}
NOT_RUN = {
    'python evaluate.py config/captions.py --out_dir=weights/captions --texts=elsewhere.txt': 'needs MiniLM; --texts runs in test_evaluate.py',
    'git clone': 'needs a network',
    'make ': 'installs from a network; the commands behind it run here',
    'pip install': 'installs from a network',
    'python prepare.py --hub_dataset=wikitext-103': 'downloads a dataset of the hub (tests/test_sources.py has a small one)',
    'python prepare.py config/wikitext103.py': 'the same',
    'python prepare.py config/openwebtext.py': 'the same',
    'torchrun --standalone --nproc_per_node=8 prepare.py config/l2t.py --input= --hub_dataset=openwebtext': 'the same',
    'python prepare.py --input=notes.txt --encoder=e5_small': 'downloads an encoder (tests/test_extending.py loads its row from a folder)',
}


# ---- which commands there are

def lines_of_fences(text):
    """ (number, line) of the lines in fenced blocks without a language, or of a shell. """
    language = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith('```'):
            language = None if language is not None else line.strip('` ')
        elif language in ('', 'sh', 'bash'):
            yield number, line


def lines_of_header(source):
    """ (number, line) of the docstring of a Python file, as it is written. """
    first = ast.parse(source).body[0]
    for number, line in enumerate(source.splitlines()[:first.end_lineno], 1):
        if line.startswith('    '):
            # behind three blanks stands what it does
            yield number, re.split(' {3,}', line.strip().replace('\\\\', '\\'))[0]


def joined(lines):
    """ A line that ends in a backslash goes on in the next one. """
    begun, start = '', None
    for number, line in lines:
        start = start or number
        begun += line
        if begun.endswith('\\'):
            begun = begun[:-1].rstrip() + ' '
            continue
        yield start, re.sub(r'\s+', ' ', begun).strip()
        begun, start = '', None


def without_launcher(words):
    """ The words that a launcher starts on each process; a launcher's own options must be its own. """
    if words[0] == 'torchrun':
        told = get_args_parser().parse_args(words[1:])
        return ['python', told.training_script, *told.training_script_args]
    if words[0] == 'srun':
        return words[next(i for i, word in enumerate(words) if i and not word.startswith('-')):]
    return words


def command_of(where, line):
    """ A Command of a line, None where it is no command. """
    line = re.sub(r'^(?:[A-Z_]+=\S+ )+', '', line)              # variables of the environment
    if not re.match(r'(python|torchrun|srun|make|pip|git) [\w<./-]', line):
        return None
    words = shlex.split(line, comments=True)
    words = words[:next((i for i, word in enumerate(words) if word in ('|', '&&')), None)]
    line = shlex.join(words).replace("'", '"')
    try:
        words = without_launcher(words)
    except SystemExit:
        return Command(where, line, 'no such option of the launcher', [])
    if words[0] != 'python' or words[1] == '-':
        return Command(where, line, None, words)
    if words[1] == '-m':
        is_ours = words[2].split('.')[0] == 'runs'
        return Command(where, line, words[2].replace('.', '/') + '.py' if is_ours else None, words[3:])
    return Command(where, line, words[1], words[2:])


def commands_of(name):
    """ The commands of a page's fenced blocks, or of a Python file's header. """
    text, found, aliases = (ROOT / name).read_text(), [], {}
    lines = lines_of_header(text) if name.endswith('.py') else lines_of_fences(text)
    for number, line in joined(lines):
        # a function of the shell that stands for the beginning of a command
        if alias := re.match(r'(\w+)\(\) \{ (.*) "\$@"; \}$', line):
            aliases[alias[1]] = alias[2]
        first, _, rest = line.partition(' ')
        if command := command_of(f'{name}:{number}', f'{aliases.get(first, first)} {rest}'.strip()):
            found.append(command)
    return found


def first_of_each(commands, key):
    """ The commands without those whose key an earlier one has. """
    found = {}
    for command in commands:
        found.setdefault(key(command), command)
    return list(found.values())


ALL = [command for name in PAGES + CONFIGS for command in commands_of(name)]
DISTINCT = first_of_each(ALL, lambda command: command.line)


def listed(table, command):
    return next((start for start in table if command.line.replace('"', '').startswith(start.replace('"', ''))), None)


def inline_commands(name):
    """ What a page says in `code` within its prose: whole commands, and knobs alone, which are of any script. """
    prose = re.sub(r'^```.*?^```', lambda m: '\n' * m[0].count('\n'), (ROOT / name).read_text(), flags=re.S | re.M)
    for found in re.finditer(r'`([^`]+)`', prose):
        where = f'{name}:{prose.count(chr(10), 0, found.start()) + 1}'
        text = ' '.join(found[1].replace('\\|', '|').split())
        if '...' in text.split() or text.startswith('--') and '--' in text.lstrip('-') and '=' not in text:
            continue
        if re.match(r'(python |torchrun )?\w+\.py ', text):
            yield command_of(where, text if text.startswith(('python', 'torchrun')) else f'python {text}')
        elif re.match(r'--[a-z_0-9]+(=| |$)', text):
            yield Command(where, text, None, shlex.split(text))


# ---- are they what the scripts know?

CHECK = """
import contextlib, functools, io, json, sys
import configurator
configurator.read_knobs = functools.cache(configurator.read_knobs)           # a script is read once
answers = []
for path, args in json.load(sys.stdin):
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            answers.append(('', configurator.configure({'__file__': path}, args, show=False)))
    except SystemExit:
        answers.append((err.getvalue().strip(), {}))
print(json.dumps(answers))
"""


def resolved(commands, root=ROOT):
    """ (error or '', the knobs) of each command, by the configurator of a tree. """
    pairs = [(str(root / command.script), command.args) for command in commands]
    code = f'import io, sys; sys.path.insert(0, {str(root)!r}); sys.stdin = io.StringIO({json.dumps(pairs)!r})\n{CHECK}'
    result = run_code(code, cwd=root, PYTHONPATH=str(root))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def problems(commands, root=ROOT):
    """ What is wrong with commands: file, line, the command and why. """
    found = [(command, 'no such script') for command in commands if command.script and not (root / command.script).is_file()]
    ours = [command for command in commands if command.script and (root / command.script).is_file()]
    scripts = [command for command in ours if not command.script.startswith('examples/')]
    found += [(command, error) for command, (error, _) in zip(scripts, resolved(scripts, root)) if error]
    return [f'{command.where}: {command.line}\n    {error}' for command, error in found]


def test_every_command_names_a_script_config_files_and_knobs_that_are_there_with_values_that_they_take():
    assert len(ALL) > 150 and len({command.where.split(':')[0] for command in ALL}) > 25, 'the commands are not found any more'
    headers = [command for name in HEADERS for command in commands_of(name)]
    assert len(headers) > 50
    wrong = problems([command for command in ALL + headers if not command.where.startswith('docs/extending.md')])
    assert not wrong, '\n'.join(wrong)


def test_the_schedules_of_a_training_fill_its_steps():
    """ Read as they are written: the run below has fewer steps. """
    trainings = [command for command in ALL if command.script == 'train.py' and not command.where.startswith('docs/extending.md')]
    for command, (_, knobs) in zip(trainings, resolved(trainings)):
        for name in ('mode', 'length_schedule'):
            schedule = knobs['mode'] if name == 'mode' else knobs['length_schedule'] or '40'
            try:
                read_schedule(name, schedule, name, knobs['max_iters'])
            except ValueError as error:
                pytest.fail(f'{command.where}: {command.line}\n    {error}')


def test_an_overlay_that_learns_latents_beside_text_reads_whole_texts_where_its_config_cuts_them():
    overlays = [name for name in CONFIGS if 'dataset =' not in (ROOT / name).read_text()]
    cutting = 'config/captions.py'
    commands = [Command(name, '', 'train.py', [cutting, name]) for name in (cutting, *overlays)]
    (_, plain), *found = resolved(commands)
    assert ':' in plain['length_schedule'] and len(overlays) > 7
    learns = {name: knobs for name, (_, knobs) in zip(overlays, found)
              if len(knobs['streams']) == 2 and knobs['mode'] != plain['mode'] and modes_of(knobs['mode']) & {'t2l', 'unconditional'}}
    assert len(learns) >= 2 and not [name for name, knobs in learns.items() if knobs['length_schedule']]


def test_make_and_pip_name_what_there_is():
    packages = (ROOT / 'docs/troubleshooting.md').read_text() + (ROOT / 'requirements.txt').read_text()
    for command in ALL:
        if command.line.startswith('make '):
            assert f'\n{command.args[1]}: ' in (ROOT / 'Makefile').read_text(), command
        if command.line.startswith('pip install -r '):
            assert (ROOT / command.args[3]).is_file(), command
        elif command.line.startswith('pip install '):
            assert all(name in packages for name in command.args[2:]), command


def test_a_command_or_a_knob_that_the_prose_names_is_there():
    knobs = {script: read_knobs(ROOT / f'{script}.py') for script in SCRIPTS}
    commands, wrong = [], []
    for command in (command for name in PAGES for command in inline_commands(name)):
        script = command.script and command.script.removesuffix('.py')
        for word in command.args:
            name, equals, value = word.partition('=')
            if not name.startswith('--') or name in ('--help', '--key') or '-' in name[2:]:
                continue                                         # the last are torchrun's and srun's
            of = [script] if script in knobs else [s for s in SCRIPTS if name[2:] in knobs[s]]
            if not of or any(name[2:] not in knobs[s] for s in of):
                wrong.append(f'{command.where}: {word} is no knob of {script or "any script"}')
            elif equals and not re.fullmatch(r'[A-Z_]*|\.\.\.|<.*>.*', value.strip('"')):
                commands += [Command(command.where, command.line, f'{of[0]}.py', [f'{name}={one}']) for one in value.split('|')]
    assert len(commands) > 60
    wrong += [p for p in problems(commands) if 'leftmost' not in p]
    assert not wrong, '\n'.join(wrong)


# ---- do they run?

def test_the_lists_of_commands_that_do_not_run_here_are_of_commands_and_tests_that_there_are():
    for table in (ELSEWHERE, NOT_RUN):
        for start in table:
            assert any(listed({start: 0}, command) for command in DISTINCT), f'no command begins with {start!r}'
    for command in DISTINCT:
        assert command.script or listed(NOT_RUN, command), f'{command.where}: {command.line} is run by no test, and no reason is given'
    for start, test in ELSEWHERE.items():
        file, _, name = test.partition('::')
        assert f'def {name}(' in (ROOT / 'tests' / file).read_text(), (start, test)


def write_inputs(folder):
    """ The files that the commands read, small. """
    rng = np.random.default_rng(0)
    verbs, names = 'Return Remove Print Copy Read'.split(), 'list number items file string item line'.split()
    texts = [f'{verb} the {a} of the {b} number {i}.' for verb in verbs for a in names for b in names for i in range(2)]
    texts += ['Return a list.', 'Read a file.', 'Three children in winter coats are throwing snowballs at each other in a park.']
    rng.shuffle(texts)
    lines = '\n'.join(texts) + '\n'
    (folder / 'notes.txt').write_text('\n\n'.join(texts))
    (folder / 'texts.txt').write_text(lines)
    (folder / 'ten.txt').write_text('\n'.join(texts[:3]))
    (folder / 'more.txt').write_text(lines.replace('list', 'queue'))
    pairs = ''.join(f'{a},{b},{i % 6}\n' for i, (a, b) in enumerate(zip(texts[:9], texts[9:18])))
    (folder / 'stsb-en-dev.csv').write_text(f'sentence1,sentence2,score\n{pairs}')
    np.save(folder / 'z.npy', rng.standard_normal((len(texts), 16)).astype(np.float32))

    # captions, by records and by lines
    for name in ('captions', 'openwebtext', 'RAW', 'TENTH', 'FEW', 'docs', 'pictures'):
        (folder / name).mkdir()
    for name, field in (('captions', 'caption'), ('openwebtext', 'text')):
        records = ''.join(json.dumps({field: text}) + '\n' for text in texts)
        (folder / name / 'a.jsonl.gz').write_bytes(gzip.compress(records.encode()))
    for name in ('RAW/train.1', 'TENTH/train.1', 'FEW/train.1', 'RAW/val.1'):
        captions = lines.replace(' number ', ' red ')                    # a word that an edit changes
        (folder / f'{name}.en.gz').write_bytes(gzip.compress(captions.encode()))

    # proteins
    sequences = [''.join(rng.choice(list('ACDEFGHIKLMNPQRSTVWY'), 40)) for _ in range(60)]
    fasta = ''.join(f'>p{i}\n{s}\n' for i, s in enumerate(sequences))
    (folder / 'proteins.fasta').write_text(fasta)
    for name in ('proteins.fasta.gz', 'uniref50.fasta.gz'):
        (folder / name).write_bytes(gzip.compress(fasta.encode()))
    (folder / 'sequences.txt').write_text('\n'.join(sequences[:3]))

    # pictures
    from PIL import Image
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f'pictures/{i}.png')
    rows = ''.join(f'{i}.png,a picture number {i}\n' for i in range(24))
    (folder / 'pictures/metadata.csv').write_text(f'file_name,text\n{rows}')


HUB = ('minilm', 'e5', 'bge', 'qwen')
TINY = dict(depth=1, width=32, heads=2, latent_width=32, batch_size=8, max_iters=2, warmup_iters=0, eval_iters=1, eval_interval=2,
            log_interval=1, device='cpu', dtype='float32', compile='false')


def small(script, knobs):
    """ {knob: value}, what makes a command small whose knobs are these. """
    if script == 'prepare.py':
        if knobs['inspect'] or knobs['export_dir']:
            return {}
        more = dict(vocab_size=min(400, knobs['vocab_size']), max_tokens=min(39, knobs['max_tokens'] or 39), val_fraction=.2,
                    max_documents=400, encoder_dims=16, encoder_ngrams=1, threads=1, homology=0, shard_size=200)
        if knobs['same_as']:
            more = {knob: value for knob, value in more.items() if knob not in OF_SAME_AS}
        if knobs['tokenizer'] == 'r50k_base':
            more |= dict(tokenizer='bpe')
        if knobs['encoder'] in HUB:
            more |= dict(encoder='none' if knobs['import_dir'] or knobs['latents_from'] else 'lsa')
        if knobs['input'] == 'builtin' and not knobs['import_dir']:
            more |= dict(input='notes.txt')                      # half a minute to read; tests/test_prepare.py does
        return more
    if script == 'train.py':
        more = dict(TINY, latent_tokens=min(2, knobs['latent_tokens']))
        if knobs['global_batch']:
            more |= dict(global_batch=16)
        if ':' in knobs['length_schedule'] and '%' not in knobs['length_schedule']:
            more |= dict(length_schedule='24:1,40')
        if not knobs['predict_length']:
            more |= dict(seq_len=min(256, knobs['seq_len']))
        return more
    if script in ('sample.py', 'evaluate.py'):
        more = dict(device='cpu', dtype='float32')
        if knobs['steps'] == 0 or knobs['steps'] > 40:
            more |= dict(steps=3)
        if (knobs['latent_steps'] or 32) > 2:
            more |= dict(latent_steps=2)
        if script == 'evaluate.py':
            more |= dict(n=4, draws=1, n_orders=1, seeds=1, rerank=min(2, knobs['rerank']), compile='false')
        return more
    return {}


ORDER = ['prepare.py', 'train.py', 'runs/export.py', 'sample.py', 'evaluate.py', 'plot.py']


def in_order(commands):
    """ (command, its arguments with the small ones) in an order in which each finds what it reads. """
    # what differs in its launcher alone runs once
    commands = [command for command in commands if not listed(ELSEWHERE, command) and not listed(NOT_RUN, command)]
    commands = first_of_each(commands, lambda command: (command.script, *command.args))
    found = []
    for command, (error, knobs) in zip(commands, resolved(commands)):
        assert not error, f'{command.where}: {error}'
        given = {f'--{name}={value}': 0 for name, value in small(command.script, knobs).items()}
        is_late = command.script == 'prepare.py' and bool(knobs['import_dir'] or knobs['export_dir'] or knobs['inspect'])
        found.append((ORDER.index(command.script), is_late, command, [*command.args, *given], knobs))
    found.sort(key=lambda row: row[:2])

    # a dataset or a run whose folder another command has taken gets one of its own
    taken = set()
    for i, (_, is_late, command, args, knobs) in enumerate(found):
        knob = {'prepare.py': 'out', 'train.py': 'out_dir'}.get(command.script)
        if knob and not is_late and not knobs.get('preflight_only'):
            if knobs[knob] in taken:
                args.append(f'--{knob}={knobs[knob]}_again{i}')
            taken.add(knobs[knob])
    return [(command, args) for _, _, command, args, _ in found]


def test_every_command_runs_at_a_tiny_size(tmp_path):
    for library in ('sklearn', 'PIL', 'matplotlib'):
        pytest.importorskip(library, reason='pip install -r tests/requirements.txt')
    write_inputs(tmp_path)
    rows = in_order(DISTINCT)

    # what the hub would give, and a folder of the earlier layout, are made of what is here
    n_prepared = sum(command.script == 'prepare.py' for command, _ in rows)
    first = next(i for i, (command, _) in enumerate(rows) if '--import_dir=OLD' in command.args)
    before = [[command.script, *args] for command, args in rows[:n_prepared]]
    before.insert(first, ['prepare.py', '--export_dir=OLD', '--out=data/notes'])
    results = run_each(*before, cwd=tmp_path)
    assert results.pop(first)[0] == 0
    for name in ('wikitext103', 'openwebtext'):
        shutil.copytree(tmp_path / 'data/notes', tmp_path / 'data' / name)

    results += run_each(*[[command.script, *args] for command, args in rows[n_prepared:]], cwd=tmp_path)
    wrong = [f'{command.where}: {command.line}\n    {err.strip()[-600:]}' for (command, _), (code, _, err) in zip(rows, results) if code]
    assert len(rows) > 90 and not wrong, '\n'.join(wrong)
