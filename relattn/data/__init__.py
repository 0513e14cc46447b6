"""Data: embedded subsets, TFDS, image folders and text, behind one protocol."""

from relattn.data.augment import Mix, make_mix
from relattn.data.base import (
    Batch,
    DataInfo,
    DataSource,
    EvalSplit,
    ImageInfo,
    Loader,
    TextInfo,
    batch_indices,
    fill_batch,
    read_info,
    steps_per_epoch,
)
from relattn.data.images import ImageData, ImageSplit
from relattn.data.load import load_data, load_images
from relattn.data.preprocess import input_shape, make_preprocess, preprocess
from relattn.data.streaming import StreamedImages, StreamedSplit
from relattn.data.text import TextData, TokenSplit, load_text
from relattn.data.tfds import DatasetNotPreparedError
from relattn.data.tokenizers import Tokenizer, load_tokenizer

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
    "Mix",
    "StreamedImages",
    "StreamedSplit",
    "TextData",
    "TextInfo",
    "TokenSplit",
    "Tokenizer",
    "batch_indices",
    "fill_batch",
    "input_shape",
    "load_data",
    "load_images",
    "load_text",
    "load_tokenizer",
    "make_mix",
    "make_preprocess",
    "preprocess",
    "read_info",
    "steps_per_epoch",
]
