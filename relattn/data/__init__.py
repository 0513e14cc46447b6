"""Data: embedded subsets, TFDS and image folders, behind one protocol."""

from relattn.data.batches import Batch, batch_indices, fill_batch, steps_per_epoch
from relattn.data.full import DatasetNotPreparedError
from relattn.data.images import ImageData, ImageSplit
from relattn.data.load import load_data, load_images
from relattn.data.loader import Loader
from relattn.data.preprocess import input_shape, make_preprocess, preprocess
from relattn.data.source import (
    DataInfo,
    DataSource,
    EvalSplit,
    ImageInfo,
    TextInfo,
    read_info,
)

__all__ = [
    "Batch",
    "DataInfo",
    "DataSource",
    "DatasetNotPreparedError",
    "EvalSplit",
    "ImageData",
    "ImageInfo",
    "ImageSplit",
    "Loader",
    "TextInfo",
    "batch_indices",
    "fill_batch",
    "input_shape",
    "load_data",
    "load_images",
    "make_preprocess",
    "preprocess",
    "read_info",
    "steps_per_epoch",
]
