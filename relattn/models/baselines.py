"""The baselines of Horn et al. in the forms that their authors trained."""

from __future__ import annotations

# The options of ``config.model``. The published code has no Routing Transformer. Its
# Linformer is a ViT of one patch and a CLS token; that k is more than these two tokens
# is the authors' choice. They also add a learned position to the CLS token, which is
# learned itself: 256 parameters more than here.
PUBLISHED_BASELINES = {
    "alexnet": {"name": "alexnet", "dropout": 0.5, "weight_init": "pytorch"},
    "vgg16": {"name": "vgg16", "dropout": 0.5, "weight_init": "torchvision"},
    "resnet18": {
        "name": "resnet18",
        "stem": "imagenet",
        "weight_init": "torchvision",
    },
    "linformer": {
        "name": "vit",
        "dim": 256,
        "num_layers": 12,
        "heads": 8,
        "mlp_dim": 1024,
        "patch_size": 32,
        "attention": "linformer(k=64, sharing='heads')",
        "position": "learned",
        "embedding_norms": False,
    },
}
