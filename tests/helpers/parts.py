"""Checks the parts of batches that several processes read."""

import itertools

import numpy as np


def check_parts_equal_batches(data, batch_size, num_parts):
    """Checks that the concatenated parts of every batch equal the whole batch."""

    def train(part):
        with data.train_loader(batch_size, 3, 2, part=part) as loader:
            return [batch for _, batch in itertools.islice(loader, 3)]

    def evaluate(part):
        return list(data.eval_splits["test"].batches(batch_size, part))

    for read in (train, evaluate):
        whole = read((0, 1))
        parts = [read((index, num_parts)) for index in range(num_parts)]
        for batch, *batch_parts in zip(whole, *parts, strict=True):
            for name, value in batch.items():
                joined = np.concatenate([part[name] for part in batch_parts])
                np.testing.assert_array_equal(joined, value)
