"""Data sets of images and text from many sources, behind one protocol."""

from relattn.extras import require_train

require_train(__name__)

from relattn.data.augment import Erase as Erase
from relattn.data.augment import Mix as Mix
from relattn.data.augment import make_erase as make_erase
from relattn.data.augment import make_mix as make_mix
from relattn.data.base import Batch as Batch
from relattn.data.base import DataInfo as DataInfo
from relattn.data.base import DataSource as DataSource
from relattn.data.base import EvalSplit as EvalSplit
from relattn.data.base import ImageInfo as ImageInfo
from relattn.data.base import Loader as Loader
from relattn.data.base import PointInfo as PointInfo
from relattn.data.base import TextInfo as TextInfo
from relattn.data.base import batch_indices as batch_indices
from relattn.data.base import fill_batch as fill_batch
from relattn.data.base import read_info as read_info
from relattn.data.base import steps_per_epoch as steps_per_epoch
from relattn.data.images import ImageData as ImageData
from relattn.data.images import ImageSplit as ImageSplit
from relattn.data.load import IMAGE_OPTIONS as IMAGE_OPTIONS
from relattn.data.load import image_options as image_options
from relattn.data.load import load_data as load_data
from relattn.data.load import load_images as load_images
from relattn.data.load import register_data as register_data
from relattn.data.points import PointData as PointData
from relattn.data.points import PointSplit as PointSplit
from relattn.data.points import read_point_sets as read_point_sets
from relattn.data.preprocess import input_shape as input_shape
from relattn.data.preprocess import make_preprocess as make_preprocess
from relattn.data.preprocess import preprocess as preprocess
from relattn.data.preprocess import standardize as standardize
from relattn.data.preprocess import with_image_size as with_image_size
from relattn.data.streaming import StreamedImages as StreamedImages
from relattn.data.streaming import StreamedSplit as StreamedSplit
from relattn.data.text import TextData as TextData
from relattn.data.text import TokenSplit as TokenSplit
from relattn.data.text import load_text as load_text
from relattn.data.tfds import DatasetNotPreparedError as DatasetNotPreparedError
from relattn.data.tokenizers import Tokenizer as Tokenizer
from relattn.data.tokenizers import load_tokenizer as load_tokenizer
from relattn.data.user_images import describe_preprocessing as describe_preprocessing
from relattn.data.user_images import library_preprocessing as library_preprocessing
from relattn.data.user_images import prepare_images as prepare_images
from relattn.data.user_images import read_images as read_images
