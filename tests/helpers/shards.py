"""Checks the shards of batches that several processes read."""

import itertools

import numpy as np

from relattn.data.base import ONE_SHARD, ShardIndex


def check_shards_equal_batches(data, batch_size, num_shards):
    """Checks that the concatenated shards of every batch equal the whole batch."""

    def train(shard):
        with data.train_loader(batch_size, 3, 2, shard=shard) as loader:
            return [batch for _, batch in itertools.islice(loader, 3)]

    def evaluate(shard):
        return list(data.eval_splits["test"].batches(batch_size, shard))

    for read in (train, evaluate):
        whole = read(ONE_SHARD)
        shards = [read(ShardIndex(index, num_shards)) for index in range(num_shards)]
        for batch, *pieces in zip(whole, *shards, strict=True):
            for name, value in batch.items():
                joined = np.concatenate([piece[name] for piece in pieces])
                np.testing.assert_array_equal(joined, value)
