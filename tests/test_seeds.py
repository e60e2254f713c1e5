""" What conftest.py promises every other test: numbers that depend on its name and NANOLDLM_TEST_SEED alone. """
import os
import random
import zlib

import numpy as np
import pytest
import torch


@pytest.mark.parametrize('name', ['one', 'other'])
def test_every_test_begins_with_generators_seeded_by_its_own_name(name):
    seed = os.environ.get('NANOLDLM_TEST_SEED', '0')
    test = f'test_every_test_begins_with_generators_seeded_by_its_own_name[{name}]'
    number = zlib.crc32(f'{seed} test_seeds.py {test}'.encode())
    assert random.random() == random.Random(number).random()
    assert np.random.rand() == np.random.RandomState(number).rand()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(number)))
