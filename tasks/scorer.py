"""
How likely texts are under the scorer that --scorer= names: a run of config/ar.py, or a causal
language model.

Perplexity alone rewards repetition, so entropy and repetition are measured as well.
"""
import os
from functools import lru_cache

import torch
import torch.nn.functional as F

from base.files import in_one_line
from encoders import check_files, fetch
from sampling.inputs import pack
from sampling.run import Run
from tasks.common import progress_bar
from tasks.measures import perplexity_of


def prepare_scorer(run, knobs):
    """ perplexity(texts) of the scorer that the knobs name, or None: `prepare` of the tasks that
    read it. """
    if not knobs['scorer']:
        return None
    return load_scorer(knobs['scorer'], knobs['scorer_revision'], run.net.device)


@lru_cache(maxsize=1)                          # two tasks of one command may ask for it
def load_scorer(name, revision, device):
    """ perplexity(texts): exp of the mean nats per token, each text on its own. Under a run of
    config/ar.py the first token and an EOS count; under a causal language model what is after the
    first token. """
    if os.path.isdir(os.path.join(name, 'data')):
        return scorer_of_run(name, device)

    # a folder, or a model of the hub
    where = name
    if not os.path.isdir(name):
        where, _ = fetch(name, revision or None, 'scorer')

    # a causal language model
    check_files(where)
    import transformers
    with in_one_line(f'scorer={name}, as a causal language model,'):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            where, use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        missing = sorted({*info['missing_keys'], *map(str, info['mismatched_keys'])})
        if missing:                            # they would be drawn at random, without a word
            raise ValueError(f'{len(missing)} of its weights are missing, e.g. {missing[0]}')

    # text by text: padding would need a rule of each tokenizer
    model = model.to(device).eval()
    limit = getattr(model.config, 'max_position_embeddings', 1024)

    @torch.inference_mode()
    def perplexity(texts):
        nats = count = 0
        for text in progress_bar(texts, desc='scorer', unit='text'):
            with in_one_line(f'the tokenizer of scorer={name}'):
                ids = tokenizer(text, return_tensors='pt').input_ids[:, :limit].to(device)

            # in a text of one token there is none to be scored
            if ids.shape[1] > 1:
                logits = model(ids).logits[0, :-1].float()
                nats += F.cross_entropy(logits, ids[0, 1:], reduction='sum').item()
                count += ids.shape[1] - 1
        return perplexity_of(nats, count)
    return perplexity


def scorer_of_run(out_dir, device):
    """ perplexity(texts) under an autoregressive run of ours. """
    # in float32, so that its figures are the same on machines with bfloat16 and without
    run = Run(out_dir, device=device, dtype='float32')
    if not run.net.is_causal or 'latent' in run.net.streams:
        raise ValueError(f'scorer={out_dir} is a run of ours that does not read text alone from '
                         'left to right (config/ar.py)')

    def perplexity(texts):
        tokens = pack(run, texts, cut=True)
        nats = 0

        # PAD is read, but neither its nats nor its number count
        for part in tokens.split(128):
            nats += run.net.nats(part, None, 1.0).sum().item()
        return perplexity_of(nats, (tokens != run.tokenizer.pad).sum().item())
    return perplexity
