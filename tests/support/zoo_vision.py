"""Convolution networks of the zoo, written by hand: residual, dense, U-shaped."""

from __future__ import annotations

import torch
from torch import nn
from zoo_entry import Built, Entry


class Bottleneck(nn.Module):
    """ResNet's bottleneck block: 1x1, 3x3, 1x1 with BatchNorm and in-place ReLU."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2015): 3, 4, 6, 3 bottlenecks, width divided by eight."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inside = width
        for i, (count, stride) in enumerate(((3, 1), (4, 2), (6, 2), (3, 2))):
            blocks = []
            for j in range(count):
                blocks.append(Bottleneck(inside, width << i, stride if j == 0 else 1))
                inside = 4 * (width << i)
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _resnet50() -> Built:
    batch = (torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,)))
    return Built(ResNet50().train(), batch, nn.functional.cross_entropy, 4)


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) of four levels: long skips from encoder to decoder."""

    def __init__(self, width: int = 4, depth: int = 4) -> None:
        super().__init__()
        channels = [width << i for i in range(depth)]
        self.down = nn.ModuleList(
            self._double(a, b) for a, b in zip([3, *channels], channels, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2)
            for a, b in zip(channels[-2::-1], channels[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(self._double(2 * a, a) for a in channels[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(2, b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


def _unet() -> Built:
    batch = (torch.randn(4, 3, 32, 32), torch.randint(0, 2, (4, 32, 32)))
    return Built(UNet(), batch, nn.functional.cross_entropy, 4)


class DenseLayer(nn.Module):
    """DenseNet's layer: BatchNorm, ReLU, 1x1, BatchNorm, ReLU, 3x3 on the concatenation so far."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inside)
        self.conv1 = nn.Conv2d(inside, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(nn.functional.relu(self.norm1(x), inplace=True))
        return self.conv2(nn.functional.relu(self.norm2(x), inplace=True))


class DenseNet121(nn.Module):
    """DenseNet-121 (Huang et al. 2016): 6, 12, 24, 16 layers, growth 2 instead of 32."""

    def __init__(self, growth: int = 2, classes: int = 10) -> None:
        super().__init__()
        inside = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, inside, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(inplace=True),
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for i, count in enumerate((6, 12, 24, 16)):
            self.blocks.append(
                nn.ModuleList(DenseLayer(inside + j * growth, growth) for j in range(count))
            )
            inside += count * growth
            if i < 3:
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(inside),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(inside, inside // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                inside //= 2
        self.norm = nn.BatchNorm2d(inside)
        self.classifier = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            features = [x]
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, 1)
            if i < len(self.transitions):
                x = self.transitions[i](x)
        x = nn.functional.relu(self.norm(x), inplace=True)
        return self.classifier(x.mean((2, 3)))


def _densenet121() -> Built:
    batch = (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
    return Built(DenseNet121().train(), batch, nn.functional.cross_entropy, 4)


VISION: dict[str, Entry] = {
    "resnet50": Entry(_resnet50, cuttable=False, note="BatchNorm, in-place ReLU and add"),
    "densenet121": Entry(_densenet121, cuttable=False, note="BatchNorm, concatenations of all"),
    "unet": Entry(_unet, note="long skips"),
}
