"""Image data: embedded subsets, TFDS and image folders."""
