"""
Proteins: FASTA files, and clusters of similar sequences.

A FASTA file has records: a line that begins with '>' and names a protein, then lines of residues.

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
from runs.files import short

FASTA = ('.fasta', '.fa', '.faa', '.fas', '.fsa', '.fna', '.ffn', '.frn', '.pep')
GAP = re.compile('[.-]')
UNKNOWN = re.compile(f'[^{re.escape(RESIDUES)}]')
COMMENTS = (';', '#', '!')
SEQUENCE = re.compile('[A-Za-z*.-]+')                        # residues, gaps and stops
PIR = re.compile('>(P1|F1|DL|DC|RL|RC|N1|N3|XX);')           # its records have a line of words


def read_fasta(f, counts):
    """ The sequences of a readers.TextFile, in capital letters. A letter that is not in ESM's
    alphabet becomes X and is counted; gaps are left out and counted. ValueError at a line that is
    no name, comment or sequence. """
    parts = None                                 # lines of the record; None before the first record
    for line in itertools.chain(f, ['>']):
        line = line.strip()
        if line.startswith('>'):
            # the record before this line is complete
            if parts is not None:
                sequence = ''.join(parts).upper().removesuffix('*')
                sequence, n_unknown = UNKNOWN.subn('X', sequence)
                counts['unknown_residues'] += n_unknown
                yield sequence
            parts = []
        if PIR.match(line):
            raise ValueError(f'{f.place}: found {short(line)}, a record of PIR: convert it to '
                             'FASTA')
        if not line or line.startswith(('>', *COMMENTS)):
            continue
        if parts is None or not SEQUENCE.fullmatch(line):
            expected = '">name"' if parts is None else 'residues, ">name" or a comment with ;'
            raise ValueError(f'{f.place}: found {short(line)}, expected {expected}')
        letters, n_gaps = GAP.subn('', line)
        counts['gaps'] += n_gaps
        parts.append(letters)


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
        with open(fasta, 'w') as f:
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
