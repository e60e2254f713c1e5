""" How many steps fit into the seconds that are left: steps.py LOG SECONDS [--knob=value ...]. The
log is of a probe with both stages (35 %); a start of about 12 s, validations and saves are taken
off. """
import json
import sys

path, left, *knobs = sys.argv[1:]
knobs = dict(knob[2:].split('=') for knob in knobs)
entries = [json.loads(line) for line in open(path)]
entries = [e for e in entries if 'tokens_per_s' in e]
last = entries[-1]['step']
tokens = entries[-1]['tokens'] / last                      # a step
first = [e for e in entries if e['step'] < .35 * last or e is entries[0]][-1]
seconds = .35 * tokens / first['tokens_per_s'] + .65 * tokens / entries[-1]['tokens_per_s']
print(max(4, int((float(left) - 12 - 8) / seconds * .95)), end='')
print(f'{1000 * seconds:.0f} ms a step', file=sys.stderr)
