"""
Every command of README.md, docs/ and config/ is one that a reader can type: its script, its config
files and its knobs are there, and it runs.

Two commands with the same words are one. They run in one folder of small files, in the order
prepare, train, export, sample, evaluate, plot. A command runs as it is written, with the knobs of
`small` behind it, and the last one wins: a tiny network, few texts, `lsa` in place of an encoder of
the hub. All commands of a script run in one process, also in place of torchrun's.
"""
import ast
import json
import re
import shlex
import shutil
from collections import namedtuple

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

from launch import EXTENDING, ROOT, flags, run_code, run_together
from prepare import OF_SAME_AS
from runs.stages import read_schedule
from toys import put, write_lines

# where: file:line; line: as it is written, without its comment; script: None for another program;
# args: what the script is given
Command = namedtuple('Command', 'where line script args')


def names_of(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


PAGES = ['README.md', *names_of('docs/*.md')]
CONFIGS = names_of('config/*.py')
HEADERS = names_of('*.py') + names_of('runs/*.py') + names_of('processes/*.py')

# what a command begins with that does not run here: it needs a network, or another test runs it
NOT_RUN = (
    'git clone', 'make ', 'pip install', 'sh results/release.sh',
    'python prepare.py --hub_dataset=wikitext-103', 'python prepare.py config/wikitext103.py',
    'python prepare.py config/openwebtext.py',
    'torchrun --standalone --nproc_per_node=8 prepare.py config/l2t.py --input= --hub_dataset',
    'python prepare.py --input=notes.txt --encoder=e5_small',
    'python evaluate.py config/captions.py --out_dir=weights/captions',
    # test_weights.py, test_examples.py, test_image.py, test_bench.py
    'python sample.py --out_dir=weights/', 'python examples/',
    'python evaluate.py config/icons.py', 'python plot.py config/icons.py',
    'python bench.py', 'python evaluate.py config/molecules.py',     # of fingerprints
)

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


def command_of(where, line):
    """ A Command of a line, None where it is no command. """
    line = re.sub(r'^(?:(?:srun|[A-Z_]+=\S+) )+', '', line)  # and variables of the environment
    if not re.match(r'(python|torchrun|make|pip|git) [\w<./-]', line):
        return None
    words = shlex.split(line, comments=True)
    words = words[:next((i for i, word in enumerate(words) if word in ('|', '&&')), None)]
    line = shlex.join(words).replace("'", '"')

    # what a launcher starts; its options must be its own
    if words[0] == 'torchrun':
        told = get_args_parser().parse_args(words[1:])
        words = ['python', told.training_script, *told.training_script_args]

    if words[0] != 'python' or words[1] == '-':
        return Command(where, line, None, words)
    if words[1] == '-m':
        is_ours = words[2].split('.')[0] == 'runs'
        script = words[2].replace('.', '/') + '.py' if is_ours else None
        return Command(where, line, script, words[3:])
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
        line = f'{aliases.get(first, first)} {rest}'.strip()
        if command := command_of(f'{name}:{number}', line):
            found.append(command)
    return found


def first_of_each(commands, key):
    """ The commands without those whose key an earlier one has. """
    found = {}
    for command in commands:
        found.setdefault(key(command), command)
    return list(found.values())


# test_extending.py runs those of docs/extending.md
ALL = [command for name in PAGES + CONFIGS if name != EXTENDING for command in commands_of(name)]


def runs_here(command):
    return command.script and not command.line.replace('"', '').startswith(NOT_RUN)

# ---- are they what the scripts know?

CHECK = """
import contextlib, functools, io, json, sys
import configurator
configurator.read_knobs = functools.cache(configurator.read_knobs)       # a script is read once
answers = []
for path, args in json.loads(sys.argv[1]):
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            knobs = configurator.configure({'__file__': path}, args, show=False)
        answers.append(('', knobs))
    except SystemExit:
        answers.append((err.getvalue().strip(), {}))
print(json.dumps(answers))
"""


def resolved(commands, root=ROOT):
    """ (error or '', the knobs) of each command, by the configurator of a tree. """
    pairs = json.dumps([(str(root / command.script), command.args) for command in commands])
    result = run_code(CHECK, pairs, cwd=root, PYTHONPATH=str(root))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def problems(commands, root=ROOT):
    """ What is wrong with commands: file, line, the command and why. """
    found, known = [], []
    for command in commands:
        if command.script and not (root / command.script).is_file():
            found.append(f'{command.where}: no such script, {command.line}')
        elif command.script and not command.script.startswith('examples/'):
            known.append(command)
    for command, (error, _) in zip(known, resolved(known, root)):
        if error:
            found.append(f'{command.where}: {command.line}\n    {error}')
    return '\n'.join(found)


def test_every_command_names_a_script_config_files_and_knobs_that_are_there():
    headers = [command for name in HEADERS for command in commands_of(name)]
    for found in (ALL, headers):
        assert {command.script for command in found} >= {*ORDER}, 'commands are not found any more'
    assert not problems(ALL + headers)
    targets = {command.args[1] for command in ALL if command.line.startswith('make ')}
    makefile = (ROOT / 'Makefile').read_text()
    assert targets and all(f'\n{target}: ' in makefile for target in targets)


def test_the_commands_of_the_page_are_right_where_its_extensions_are_made(tree):
    commands = commands_of(EXTENDING)
    assert {'train.py', 'sample.py'} <= {command.script for command in commands}
    assert not problems(commands, tree)


def test_the_schedules_of_a_training_fill_its_steps():
    """ Read as they are written: the run below has fewer steps. """
    trainings = [command for command in ALL if command.script == 'train.py']
    for _, knobs in resolved(trainings):
        for name in ('mode', 'length_schedule'):
            read_schedule(name, knobs[name] or '40', name, knobs['max_iters'])


# ---- do they run?

def write_inputs():
    """ The files that the commands read, small. """
    rng = np.random.default_rng(0)
    verbs = 'Return Remove Print Copy Read'.split()
    names = 'list number items file string item line'.split()
    texts = [f'{verb} the {a} of the {b} number {i}.'
             for verb in verbs for a in names for b in names for i in range(2)]
    texts += ['Return a list.', 'Read a file.', 'Three children in winter coats are throwing '
              'snowballs at each other in a park.']
    rng.shuffle(texts)
    z = rng.standard_normal((len(texts), 16)).astype(np.float32)
    np.save('z.npy', z)
    # as a config: not every direction reads both, and a flag would be refused
    put('few_steps.py', 'steps = 3\nlatent_steps = 2\n')

    # texts, captions, pairs of texts
    put('notes.txt', '\n\n'.join(texts))
    for name in ('texts.txt', 'train.txt', 'val.txt'):
        write_lines(name, texts)
    write_lines('more.txt', [text.replace('list', 'queue') for text in texts])
    for name in ('RAW/train.1.en.gz', 'RAW/val.1.en.gz'):
        # a word that an edit changes
        write_lines(name, [text.replace(' number ', ' red ') for text in texts])
    pairs = [f'{a},{b},{i % 6}' for i, (a, b) in enumerate(zip(texts[:9], texts[9:18]))]
    write_lines('stsb-en-dev.csv', ['sentence1,sentence2,score', *pairs])

    # records
    for name, field in (('captions/a.jsonl.gz', 'caption'), ('openwebtext/a.jsonl.gz', 'text')):
        write_lines(name, [json.dumps({field: text}) for text in texts])
    write_lines('docs.jsonl', [json.dumps(dict(text=text, embedding=row))
                               for text, row in zip(texts, z.tolist())])

    # proteins
    sequences = rng.choice(list('ACDEFGHIKLMNPQRSTVWY'), (60, 40))
    fasta = [f'>p{i}\n{"".join(letters)}' for i, letters in enumerate(sequences)]
    for name in ('proteins.fasta', 'proteins.fasta.gz', 'uniref50.fasta.gz'):
        write_lines(name, fasta)

    # pictures
    from PIL import Image
    write_lines('pictures/metadata.csv',
                ['file_name,text', *(f'{i}.png,a picture number {i}' for i in range(24))])
    for i in range(24):
        pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(f'pictures/{i}.png')

    # icons, and one of which a half is missing
    drawings = {f'w{i}-v{j}': dict(body=f'<path d="M{i} {j}h9v9z"/>')
                for i in range(8) for j in range(8)}
    info = dict(license=dict(spdx='MIT'), palette=False)
    put('icon-sets/json/tiny.json', json.dumps(dict(prefix='tiny', info=info, icons=drawings)))
    half = np.full((32, 32, 4), 255, np.uint8)
    Image.fromarray(half).save('icon.png')
    half[:, 16:, 3] = 0
    Image.fromarray(half).save('half.png')


HUB = ('minilm', 'e5', 'bge', 'qwen', 'morgan')          # of the hub, or of another package
TINY = dict(depth=1, width=32, heads=2, latent_width=32, batch_size=8, max_iters=2, warmup_iters=0,
            eval_rows=8, eval_interval=2, log_interval=1, device='cpu', dtype='float32',
            compile='false')


def small(script, knobs):
    """ {knob: value}, what makes a command small whose knobs are these. """
    if script == 'prepare.py':
        if knobs['inspect'] or knobs['export_dir']:
            return {}
        more = dict(vocab_size=min(400, knobs['vocab_size']), val_fraction=.2, max_documents=400,
                    max_tokens=min(39, knobs['max_tokens'] or 39), encoder_dims=16,
                    encoder_ngrams=1, threads=1, shard_size=200)
        if knobs['same_as']:
            more = {knob: value for knob, value in more.items() if knob not in OF_SAME_AS}
        if knobs['tokenizer'] == 'r50k_base':
            more |= dict(tokenizer='bpe')
        if knobs['encoder'] in HUB:
            more |= dict(encoder='none' if knobs['import_dir'] or knobs['latents_from'] else 'lsa')
        if knobs['input'] == 'builtin' and not knobs['import_dir']:
            more |= dict(input='notes.txt')                # half a minute to read
        return more
    if script == 'train.py':
        more = dict(TINY, latent_tokens=min(2, knobs['latent_tokens']))
        if knobs['global_batch']:
            more |= dict(global_batch=16)
        if not knobs['predict_length']:
            more |= dict(seq_len=min(256, knobs['seq_len']))
        return more
    if script in ('sample.py', 'evaluate.py'):
        more = dict(device='cpu', dtype='float32')
        if script == 'evaluate.py':
            more |= dict(n=4, draws=1, n_orders=1, rerank=min(2, knobs['rerank']))
        return more
    return {}


ORDER = ['prepare.py', 'train.py', 'runs/export.py', 'sample.py', 'evaluate.py', 'plot.py']


def in_order(commands):
    """ (command, its arguments with the small ones), so that each finds what it reads. """
    # what differs in its launcher alone runs once
    commands = filter(runs_here, commands)
    commands = first_of_each(commands, lambda command: (command.script, *command.args))
    found = []
    for command, (error, knobs) in zip(commands, resolved(commands)):
        assert not error, f'{command.where}: {error}'
        args = [*command.args, *flags(**small(command.script, knobs))]
        if command.script in ('sample.py', 'evaluate.py'):
            args.append('few_steps.py')
        is_late = any(knobs.get(name) for name in ('import_dir', 'export_dir', 'inspect'))
        found.append((command, args, knobs, is_late))
    found.sort(key=lambda row: (ORDER.index(row[0].script), row[3]))

    # a dataset or a run whose folder another command has taken gets one of its own
    taken = set()
    for i, (command, args, knobs, is_late) in enumerate(found):
        knob = {'prepare.py': 'out', 'train.py': 'out_dir'}.get(command.script)
        if knob and not is_late and not knobs.get('preflight_only'):
            if knobs[knob] in taken:
                args.append(f'--{knob}={knobs[knob]}_again{i}')
            taken.add(knobs[knob])
    return [(command, args) for command, args, _, _ in found]


def test_every_command_runs_at_a_tiny_size(here):
    for library in ('PIL', 'matplotlib', 'resvg_py'):
        pytest.importorskip(library, reason='pip install -r tests/requirements.txt')
    write_inputs()
    rows = in_order(ALL)

    # what the hub would give, and a folder of the earlier layout, are made of what is here
    made = [([command.script, *args], command) for command, args in rows]
    first = next(i for i, (args, _) in enumerate(made) if '--import_dir=OLD' in args)
    made.insert(first, (['prepare.py', '--export_dir=OLD', '--out=data/notes'], None))
    wrong = []
    for script in ORDER:
        of_script = [row for row in made if row[0][0] == script]
        results = run_together(*[args for args, _ in of_script], cwd=here)
        wrong += [f'{command and command.where}: {args}\n    {err.strip()[-600:]}'
                  for (args, command), (code, _, err) in zip(of_script, results) if code]
        if script == 'prepare.py':
            for name in ('wikitext103', 'openwebtext'):
                shutil.copytree('data/notes', f'data/{name}')
    assert {command.script for command, _ in rows} == {*ORDER} and not wrong, '\n'.join(wrong)
