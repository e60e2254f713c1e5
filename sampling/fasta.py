""" Proteins on their way out: FASTA files. """
import re

from runs.writing import write_text

LINE = 60                      # residues in a line of a FASTA file


def write_fasta(path, sequences):
    """ A file of sequences, named sample_1, sample_2, ... """
    lines = []
    for i, residues in enumerate(sequences, 1):
        lines.append(f'>sample_{i} length={len(residues)}')
        lines += re.findall(f'.{{1,{LINE}}}', residues) or ['']
    write_text(path, '\n'.join([*lines, '']))
