"""The network of `cifar10.py` for pictures of 32×32, how it is trained, and how it is tested.

Written from the description of airbench94 with Muon: https://arxiv.org/abs/2404.00498 and
https://kellerjordan.github.io/posts/muon/. It differs in that the whitening filters come from
the first batch instead of the first pictures, which in a folder are all of one class, and in that
nothing is compiled.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 256, 256)
SMOOTHING = 0.2
WHITENING_EPOCHS = 3  #: in which the bias behind the whitening filters is trained
BIAS_RATE, HEAD_RATE, FILTER_RATE = 0.053, 0.67, 0.24
DECAY = 0.004  #: is divided by the rate, so that it is the same for all that has one
MOMENTUM, FILTER_MOMENTUM = 0.85, 0.6
#: Of three steps of Newton and Schulz, chosen for a steep slope at zero.
QUINTIC = (3.4445, -4.7750, 2.0315)
LOGITS_SCALE = 1 / 256


class Network(nn.Module):
    """Images (N, 3, 32, 32) to a score for each class, (N, classes).

    ``width`` multiplies the number of filters. Weights and images have the same dtype, but those of
    the normalisations are float32.
    """

    def __init__(self, classes: int, width: float = 1.0) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        channels, blocks = 24, []
        for filters in (max(4, round(width * filters)) for filters in WIDTHS):
            blocks += [conv(channels, filters), nn.MaxPool2d(2), Norm(filters), nn.GELU()]
            blocks += [conv(filters, filters), Norm(filters), nn.GELU()]
            channels = filters
        self.blocks = nn.Sequential(nn.GELU(), *blocks, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(channels, classes, bias=False)
        self.head.weight.data /= self.head.weight.data.std()

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores."""
        return self.head(self.blocks(self.whiten(images))) * LOGITS_SCALE

    @torch.no_grad()
    def whiten_like(self, images: Tensor) -> None:
        """Set the fixed filters to the principal components of patches of 2×2, and their negatives.

        Each is divided by the root of its eigenvalue, to which a little is added.
        """
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)  # (N, 3, 31, 31, 2, 2)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        covariance = patches.T @ patches / len(patches)
        values, vectors = torch.linalg.eigh(covariance.cpu())  # CUDA would load a library for it
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def conv(channels: int, filters: int) -> nn.Conv2d:
    """Return a convolution of 3×3 whose first filters hand on their channel as it is."""
    made = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:channels])
    return made


class Norm(nn.BatchNorm2d):
    """A normalisation whose scale is fixed at 1."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-12, momentum=0.4)
        self.weight.requires_grad_(False)


def make_network(images: Tensor, classes: int, width: float) -> Network:
    """Return a new network on the device of the images and of their dtype, and whitened by them."""
    network = Network(classes, width).to(images.device, memory_format=torch.channels_last)
    network.to(images.dtype)
    for module in network.modules():
        if isinstance(module, Norm):
            module.float()
    network.whiten_like(images)
    return network


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix of the same singular vectors, whose singular values are about 1, bfloat16."""
    rows, columns = matrix.shape
    found = matrix.bfloat16()
    found = found.T if rows > columns else found
    found = found / (found.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(3):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return found.T if rows > columns else found


@torch.no_grad()
def step_of_muon(weights: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    """Take a step with momentum, whose update of each convolution is made orthogonal.

    The filters of a convolution are a matrix of one row for each. Before each step, they are scaled
    to a mean square norm of 1. (Jordan et al., https://kellerjordan.github.io/posts/muon/)
    """
    for weight, momentum in zip(weights, momenta, strict=True):
        momentum.mul_(FILTER_MOMENTUM).add_(weight.grad)
        ahead = weight.grad.add(momentum, alpha=FILTER_MOMENTUM)  # Nesterov's
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        update = orthogonal(ahead.flatten(1)).view(weight.shape)
        weight.add_(update.to(weight.dtype), alpha=-rate)


class Training:
    """A network, its optimizers, and their rates, which fall linearly to 0."""

    def __init__(self, network: Network, steps: int, steps_of_epoch: int) -> None:
        self.network, self.steps, self.done = network, steps, 0
        self.whitening_steps = min(steps, WHITENING_EPOCHS * steps_of_epoch)
        self.filters = [weight for weight in network.blocks.parameters() if weight.ndim == 4]
        self.momenta = [torch.zeros_like(weight) for weight in self.filters]
        biases = [module.bias for module in network.modules() if isinstance(module, Norm)]
        groups = [
            {"params": parameters, "lr": rate, "weight_decay": DECAY / rate}
            for parameters, rate in (
                ([network.whiten.bias], BIAS_RATE),  # the first, whose rate falls faster
                (biases, BIAS_RATE),
                ([network.head.weight], HEAD_RATE),
            )
        ]
        fused = network.head.weight.is_cuda
        self.sgd = torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True, fused=fused)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        left = 1 - self.done / self.steps
        whitening = max(0.0, 1 - self.done / self.whitening_steps)
        rates = BIAS_RATE * whitening, BIAS_RATE * left, HEAD_RATE * left
        for group, rate in zip(self.sgd.param_groups, rates, strict=True):
            group["lr"] = rate
        # Without a gradient, a bias is passed over by its optimizer.
        self.network.whiten.bias.requires_grad_(self.done < self.whitening_steps)
        self.network.train()
        images = images.contiguous(memory_format=torch.channels_last)
        scores = self.network(images).float()
        functional.cross_entropy(
            scores, labels, label_smoothing=SMOOTHING, reduction="sum"
        ).backward()
        self.sgd.step()
        step_of_muon(self.filters, self.momenta, FILTER_RATE * left)
        self.network.zero_grad(set_to_none=True)
        self.done += 1


@torch.no_grad()
def scores_of(network: Network, images: Tensor) -> Tensor:
    """Return scores averaged over six views: three positions of each image, and their mirrors.

    The image where it is has half of the weight. The two moved diagonally by a pixel have the rest.
    """
    height, width = images.shape[2:]
    padded = functional.pad(images, (1, 1, 1, 1), "reflect")
    moved = [padded[:, :, d : d + height, d : d + width] for d in (0, 2)]
    total: Any = 0.0
    for view, weight in zip((images, *moved), (0.5, 0.25, 0.25), strict=True):
        for mirrored in (view, view.flip(3)):
            images = mirrored.contiguous(memory_format=torch.channels_last)
            total = total + weight / 2 * network(images).float()
    return total


def accuracy(network: Network, batches: Any) -> float:
    """Return the share of images whose class has the highest score. Waits for the device."""
    network.eval()
    right, count = torch.zeros((), dtype=torch.int64), 0
    for images, labels in batches:
        right = right.to(images.device) + (scores_of(network, images).argmax(1) == labels).sum()
        count += len(labels)
    return right.item() / count
