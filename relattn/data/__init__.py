"""Image data: embedded subsets, TFDS and image folders."""

from relattn.data.batches import batch_indices, eval_batches, steps_per_epoch
from relattn.data.full import DatasetNotPreparedError
from relattn.data.images import ImageData, ImageSplit
from relattn.data.load import load_images
from relattn.data.loader import Loader
from relattn.data.preprocess import preprocess

__all__ = [
    "DatasetNotPreparedError",
    "ImageData",
    "ImageSplit",
    "Loader",
    "batch_indices",
    "eval_batches",
    "load_images",
    "preprocess",
    "steps_per_epoch",
]
