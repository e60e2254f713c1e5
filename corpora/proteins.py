"""
Proteins: FASTA files, and clusters of similar sequences.

A FASTA file has records: a line that begins with '>' and names a protein, then lines of residues.
PIR is a kind of it: '>P1;name', a line of words, then residues up to a '*'.

Similar sequences must not lie in both train and val: a model could score well by memory alone. So
prepare.py --homology=0.3 sends each cluster of mmseqs (github.com/soedinglab/MMseqs2) to one split.
"""
import itertools
import os
import re
import shutil
import subprocess
import tempfile

from corpora.tokenizers import RESIDUES
from corpora.writing import names_path
from runs.files import short

FASTA = ('.fasta', '.fa', '.faa', '.fas', '.fsa', '.fna', '.ffn', '.frn', '.pep', '.pir')
LONGEST_LINE = 10**9           # characters
GAP = re.compile('[.-]')
UNKNOWN = re.compile(f'[^{re.escape(RESIDUES)}]')
COMMENTS = (';', '#', '!')
PIR_TITLE = re.compile('>(P1|F1|DL|DC|RL|RC|N1|N3|XX);')
# residues in blocks, gaps and stops; with numbers at its ends, as GenBank and EMBL write it
SEQUENCE = re.compile(r'([0-9]+\s)?([A-Za-z*.\s-]*)(\s[0-9]+)?')


def read_fasta(f, counts):
    """ The sequences of a readers.TextFile, in capital letters. A letter that is not in ESM's
    alphabet becomes X and is counted; gaps are left out and counted. ValueError at a line that is
    no name, comment or sequence. """
    parts = None                                 # lines of the record; None before the first record
    room = 0                                     # residues that it may still have
    is_pir = is_title = False
    for line in itertools.chain(f.lines(most=LONGEST_LINE), ['>']):
        if line.startswith('>'):
            # the record before this line is complete
            if is_pir and room >= 0 and not ''.join(parts).endswith('*'):
                raise ValueError(f'{f.place}: before it a record of PIR ends without *')
            if parts is not None:
                sequence = ''.join(parts).upper().removesuffix('*')
                sequence, n_unknown = UNKNOWN.subn('X', sequence)
                counts['unknown_residues'] += n_unknown
                yield sequence
            parts = []
            room = f.source.document_limit + 1
            is_pir = is_title = bool(PIR_TITLE.match(line))
        elif is_title:
            is_title = False
        elif not line.strip() or line.startswith(COMMENTS):
            continue
        elif parts is None:
            raise ValueError(f'{f.place}: no FASTA, found {short(line.strip())}, expected ">name"')
        elif room >= 0 and not (is_pir and parts and parts[-1].endswith('*')):
            letters, n_gaps = GAP.subn('', residues_of(line, f.place))
            counts['gaps'] += n_gaps
            parts.append(letters)
            room -= len(letters)


def residues_of(line, place):
    """ A line without spaces and the numbers at its ends. ValueError where it is no sequence. """
    found = SEQUENCE.fullmatch(line.strip())
    blocks = found[2].split() if found else []

    # blocks have one length, and the last may be shorter; the words of a sentence do not
    lengths = [len(block) for block in blocks]
    if not blocks or set(lengths[:-1]) - {lengths[0]} or lengths[-1] > lengths[0]:
        raise ValueError(f'{place}: found {short(line.strip())}, expected residues, a line with > '
                         'or a comment with ;')
    return ''.join(blocks)


def run_mmseqs(homology, *arguments):
    """ What the command prints. """
    if not shutil.which('mmseqs'):
        raise ValueError(f'homology={homology}: mmseqs is not on PATH '
                         '(https://github.com/soedinglab/MMseqs2), or set --homology=0')
    done = subprocess.run(['mmseqs', *arguments], capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[-200:]
        raise ValueError(f'mmseqs {arguments[0]} failed with code {done.returncode}: {message}')
    return done.stdout.strip()


def homology_clusters(sequences, homology):
    """ {name of a sequence: name of its cluster's representative}, of an iterable of (name,
    sequence); names are whole numbers. A cluster: so much identity over at least 80 % of the
    lengths. """
    with tempfile.TemporaryDirectory() as scratch:
        fasta = os.path.join(scratch, 'all.fasta')
        result = os.path.join(scratch, 'result')
        with names_path(fasta), open(fasta, 'w') as f:
            for name, sequence in sequences:
                f.write(f'>{name}\n{sequence}\n')
        run_mmseqs(homology, 'easy-cluster', fasta, result, os.path.join(scratch, 'tmp'),
                   '--min-seq-id', str(homology), '-c', '0.8')

        cluster_of = {}
        with open(result + '_cluster.tsv') as f:
            for line in f:
                representative, member = line.split()
                cluster_of[int(member)] = int(representative)
        return cluster_of
