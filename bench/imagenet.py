"""What every way to train ResNet-50 shares: its shape, and ImageNet-shaped rows, noise or a folder's."""

from pathlib import Path

import numpy as np

FEATURES = (64, 128, 256, 512)
BLOCKS = (3, 4, 6, 3)
CLASSES = 1000
LR, MOMENTUM = 0.1, 0.9


def images(rows, image, seed=0):
    """Noise: uint8 pixels and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, image, image, 3), np.uint8), rng.integers(0, CLASSES, rows).astype(np.int32)


def from_folder(folder):
    """The rows of `x.npy` (uint8, rows x height x width x 3) and `y.npy` (labels), memory-mapped."""
    x, y = (np.load(Path(folder) / name, mmap_mode="r") for name in ("x.npy", "y.npy"))
    if x.ndim != 4 or x.shape[1] != x.shape[2] or x.shape[3] != 3 or len(x) != len(y):
        raise SystemExit(f"{folder}: x.npy has shape {x.shape}, y.npy {y.shape}; square colour images are needed.")
    return x, y


def flops(image, blocks=BLOCKS):
    """Floating point operations to train on one image: two a multiplication, the backward pass twice the forward."""
    side = -(-image // 2)
    total, channels = side**2 * 64 * 7 * 7 * 3, 64
    side = -(-side // 2)
    for stage, (features, count) in enumerate(zip(FEATURES, blocks, strict=False)):
        for block in range(count):
            total += side**2 * channels * features
            side = -(-side // 2) if stage and not block else side
            total += side**2 * features * (9 * features + 4 * features)
            total += side**2 * channels * 4 * features if not block else 0
            channels = 4 * features
    return 3 * 2 * (total + channels * CLASSES)
