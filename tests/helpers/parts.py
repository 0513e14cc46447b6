"""What several processes read of a data set's batches."""

import itertools

import numpy as np


def expect_parts_to_make_up_the_batches(data, batch_size, num_parts):
    """Compares the parts of every batch, one after the other, with the whole."""

    def train(part):
        with data.train_loader(batch_size, 3, 2, part=part) as loader:
            return [batch for _, batch in itertools.islice(loader, 3)]

    def evaluate(part):
        return list(data.eval_splits["test"].batches(batch_size, part))

    for read in (train, evaluate):
        whole = read((0, 1))
        parts = [read((index, num_parts)) for index in range(num_parts)]
        for batch, *of_batch in zip(whole, *parts, strict=True):
            for name, value in batch.items():
                joined = np.concatenate([part[name] for part in of_batch])
                np.testing.assert_array_equal(joined, value)
