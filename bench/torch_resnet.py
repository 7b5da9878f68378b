"""Torch: the training step of ResNet-50 v1.5 by PyTorch, as `resnet.py` has it by JAX, for gpu_parts.py."""

from time import perf_counter

import torch  # type: ignore[import]  # if installed
from imagenet import CLASSES, FEATURES, LR, MOMENTUM
from torch import nn  # type: ignore[import]
from torch.nn.functional import cross_entropy  # type: ignore[import]


def convolution(inputs, features, size, stride=1):
    return nn.Conv2d(inputs, features, size, stride, size // 2, bias=False)


class Block(nn.Module):  # type: ignore[misc]  # unknown where torch is not installed
    """Three convolutions and a way around them; v1.5 strides in the middle one."""

    def __init__(self, inputs, features, stride, is_first):
        super().__init__()
        last = nn.BatchNorm2d(4 * features)
        nn.init.zeros_(last.weight)
        self.main = nn.Sequential(
            *(convolution(inputs, features, 1), nn.BatchNorm2d(features), nn.ReLU(inplace=True)),
            *(convolution(features, features, 3, stride), nn.BatchNorm2d(features), nn.ReLU(inplace=True)),
            *(convolution(features, 4 * features, 1), last),
        )
        around = [convolution(inputs, 4 * features, 1, stride), nn.BatchNorm2d(4 * features)]
        self.around = nn.Sequential(*(around if is_first else []))

    def forward(self, x):
        return torch.relu(self.main(x) + self.around(x))


def network(blocks):
    layers, inputs = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for stage, (features, count) in enumerate(zip(FEATURES, blocks, strict=False)):
        for block in range(count):
            layers.append(Block(inputs, features, 2 if stage and not block else 1, not block))
            inputs = 4 * features
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def timed_steps(x, y, blocks, steps):
    """Milliseconds of so many steps on rows that lie on the device, each run to its end; three before do not count."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True  # tries convolutions out, as XLA does
    model = network(blocks).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    pixels = torch.from_numpy(x).to(device).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    labels = torch.from_numpy(y).long().to(device)

    def loss_of(pixels, labels):
        with torch.autocast(device, torch.bfloat16):
            logits = model(pixels.to(torch.bfloat16) / 255)
        return cross_entropy(logits.float(), labels)

    loss_of, times = torch.compile(loss_of), []
    for _ in range(steps + 3):
        start = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(pixels, labels)
        loss.backward()
        optimizer.step()
        loss.item()  # which waits
        times.append(1e3 * (perf_counter() - start))
    return times[3:]
