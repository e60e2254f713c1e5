"""
Proteins in FASTA: records of a line that begins with '>' and names a protein, then lines of
residues.
"""
import itertools
import re

from corpora.tokenizers import RESIDUES
from runs.files import short

FASTA = ('.fasta', '.fa', '.faa', '.fas', '.fsa', '.fna', '.ffn', '.frn', '.pep')
GAP = re.compile('[.-]')
UNKNOWN = re.compile(f'[^{re.escape(RESIDUES)}]')
COMMENTS = (';', '#', '!')
SEQUENCE = re.compile('[A-Za-z*.-]+')                        # residues, gaps and stops
PIR = re.compile('>(P1|F1|DL|DC|RL|RC|N1|N3|XX);')           # its records have a line of words


def read_fasta(path, lines, counts):
    """ The sequences of a file, in capital letters. A letter that is not in ESM's alphabet becomes
    X and is counted; gaps are left out and counted. ValueError at a line that is no name, comment
    or sequence. """
    parts = None                                 # lines of the record; None before the first record
    for number, line in enumerate(itertools.chain(lines, ['>']), 1):
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
            raise ValueError(f'{path}, line {number}: found {short(line)}, a record of PIR: '
                             'convert it to FASTA')
        if not line or line.startswith(('>', *COMMENTS)):
            continue
        if parts is None or not SEQUENCE.fullmatch(line):
            expected = '">name"' if parts is None else 'residues, ">name" or a comment with ;'
            raise ValueError(f'{path}, line {number}: found {short(line)}, expected {expected}')
        letters, n_gaps = GAP.subn('', line)
        counts['gaps'] += n_gaps
        parts.append(letters)
