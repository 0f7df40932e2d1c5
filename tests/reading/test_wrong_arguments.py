"""A table of wrong arguments for each public function: the error, and what its message says."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from memload import (
    CudaPrefetcher,
    Loader,
    MemloadError,
    MemmapDataset,
    MixtureSampler,
    RepeatedSampler,
    SequentialSampler,
    ShuffledSampler,
    ThreadPrefetcher,
    WeightedSampler,
    background,
    fast_collate,
)

SIZE = 5
BATCHES = [[1]]
IMAGE = np.zeros((6, 8, 3), np.uint8)
MASK = np.zeros((6, 8), np.uint8)
STORED = torch.zeros(3, 6, 8, dtype=torch.uint8)
OTHERS = TensorDataset(torch.ones(3))
NO_DATASET = "must be a MemmapDataset or its path, or a list of these, not a TensorDataset. Build"


@pytest.fixture(scope="module")
def path(write_dataset, tmp_path_factory):
    columns = {
        "label": np.arange(SIZE) % 3,
        "split": np.arange(SIZE) % 2,
        "weight": np.arange(SIZE) / 2,
        "eyes": np.zeros((SIZE, 4, 2), np.float32),
    }
    facts = {"columns": columns, "categories": {"split": ("train", "val")}}
    return write_dataset(tmp_path_factory.mktemp("data"), **facts).path


def wrong(*cases):
    return pytest.mark.parametrize(("arguments", "error", "message"), cases)


class Taking:
    """An order of one's own, whose `take` returns what it should not."""

    def __init__(self, take):
        self.take = lambda epoch, positions: take(positions)

    def __len__(self):
        return SIZE


@wrong(
    ({"batch_size": 0}, ValueError, "^batch_size must be an integer of at least 1, not 0"),
    ({"num_threads": 1.5}, ValueError, "^num_threads must be an integer of at least 0, not 1.5"),
    ({"prefetch_factor": 0}, ValueError, "^prefetch_factor must be an integer of at least 1"),
    ({"seed": None}, ValueError, "^seed must be an integer, not None"),
    ({"shuffle": True, "sampler": [1]}, ValueError, "^shuffle, sampler and batch_sampler excl"),
    ({"sampler": iter([1])}, TypeError, "^sampler is a list_iterator, .* only once"),
    ({"batch_sampler": BATCHES, "drop_last": True}, ValueError, "Remove batch_size and drop_last"),
    ({"batch_sampler": BATCHES, "batch_size": 2}, ValueError, "^batch_sampler makes the batches"),
    ({"static_buffers": True}, ValueError, "^static_buffers needs batches of one size"),
    ({"rank": 1}, ValueError, "^rank=1 and num_replicas=None: give both of them or neither"),
    ({"rank": 2, "num_replicas": 2}, ValueError, "^rank must be at least 0 and less than num"),
    ({"columns": ["nose"]}, ValueError, "^columns names 'nose', which the data set does not have"),
    ({"feed": "gpu"}, ValueError, "^feed: there is no 'gpu'. Choose one of auto, resident, "),
    ({"feed": "dma", "device": "cpu"}, MemloadError, "^feed='dma' needs a CUDA device"),
    ({"cache_bytes": 1.5}, ValueError, "^1.5 is not a size"),
    ({"cache_bytes": -1}, ValueError, "^cache_bytes must be an integer of at least 0, not -1"),
    ({"device": "meta"}, ValueError, "^device: 'meta' is not supported"),
    ({"transform": [str]}, TypeError, r"^transform must be a function of images, not \[<class"),
    ({"dataset": []}, ValueError, "^path: the list of data sets is empty"),
    ({"dataset": OTHERS}, TypeError, NO_DATASET),
    ({"dataset": Subset(OTHERS, [0])}, TypeError, NO_DATASET),
    ({"num_workers": 0, "pin_memory": True}, TypeError, "^Loader has no argument 'num_workers'"),
    # What only the first batch shows:
    ({"sampler": [1, SIZE]}, IndexError, r"^sampler: there is no sample 5\. .* 0 to 4"),
    ({"sampler": [1, -SIZE - 1]}, IndexError, "^sampler: there is no sample -6"),
    ({"sampler": ShuffledSampler(100)}, IndexError, "^sampler: there is no sample"),
    ({"sampler": Taking(lambda at: at - 1)}, IndexError, "^sampler: there is no sample -1"),
    ({"sampler": [1.5, 2]}, TypeError, "^sampler: sample numbers must be integers"),
    ({"sampler": [True, False]}, TypeError, "^sampler: sample numbers must be integers"),
    ({"sampler": [[1], [2]]}, TypeError, "^sampler: sample numbers must be integers"),
    ({"sampler": Taking(lambda at: [0])}, ValueError, r"take\(\) returned .* for 5 positions"),
    ({"sampler": Taking(lambda at: at / 2)}, ValueError, r"take\(\) returned .* for 5 positions"),
)
def test_wrong_arguments_of_a_loader_are_refused(path, arguments, error, message):
    options = {"dataset": path, "batch_size": 1 if "batch_sampler" in arguments else 8}
    with pytest.raises(error, match=message):
        list(Loader(**options | arguments))


@wrong(
    ({"fingerprint": "0" * 64}, ValueError, "belongs to another Loader: its fingerprint is "),
    ({"seed": 5}, ValueError, "its seed is 5, but this Loader's is 0"),
    ({"order": "ShuffledSampler(size=5, seed=6)"}, ValueError, "its order is 'Shuffled.*but"),
    ({"epoch": "3"}, ValueError, "state: epoch must be an integer of at least 0, not '3'"),
    ({"samples_seen": -1}, ValueError, "state: samples_seen must be an integer of at least 0"),
    ({"seed": ...}, KeyError, "seed"),
)
def test_wrong_states_of_a_loader_are_refused_and_change_nothing(path, arguments, error, message):
    loader = Loader(path, sampler=WeightedSampler(np.ones(SIZE), seed=5))
    before = loader.state_dict()
    state = {name: value for name, value in {**before, **arguments}.items() if value is not ...}
    with pytest.raises(error, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    other = Loader(path, sampler=WeightedSampler(np.arange(SIZE), seed=5))  # of the same size
    with pytest.raises(ValueError, match="its order is 'WeightedSampler"):
        loader.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"^epoch must be an integer of at least 0, not -1"):
        loader.set_epoch(-1)


def out(*shape, dtype=torch.uint8, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


SEVERAL = out(4, 4, 6, 3)[::2]
NO_WEIGHTS, NO_LABELS = "^weights must be finite numbers", "^labels must be integers "
WRONG = {
    "MemmapDataset": [
        (lambda d: MemmapDataset([]), ValueError, "^path: the list of data sets is empty"),
        (lambda d: MemmapDataset(d.path, columns=["lable"]), ValueError, "It has label, split, "),
        (lambda d: MemmapDataset(d.path, columns=["image"]), ValueError, "image always comes firs"),
        (lambda d: MemmapDataset(d.path, columns="label"), TypeError, r"a list.* \['label'\]"),
        (lambda d: MemmapDataset(d.path, transforms=str, transform=str), ValueError, "combined"),
    ],
    "gather": [
        (lambda d: d.gather([0, 1], out(2, 3, 4, 6)), ValueError, r"^out is \(2, 3, 4, 6\) of"),
        (lambda d: d.gather([0, 1], out(2, 4, 6, 3, dtype=torch.int8)), ValueError, "Give .*uint8"),
        (lambda d: d.gather([0, 1], SEVERAL), ValueError, "strides .* Give a contiguous"),
        (lambda d: d.gather([0, 1], out(2, 4, 6, 3, device="meta")), ValueError, "on meta"),
        (lambda d: d.gather([0, 1], name="label"), ValueError, "no array 'label'.* has image"),
    ],
    "where": [
        (lambda d: d.where(splt="train"), ValueError, "no column 'splt'. .* label, split"),
        (lambda d: d.where(split="test"), ValueError, "has no value 'test'. It has train, val"),
        (lambda d: d.where(split=["val", 2]), ValueError, "has no value 2. It has train, val"),
        (lambda d: d.where(split=None), ValueError, "has no value None. It has train, val"),
        (lambda d: d.where(label="dog"), ValueError, "has no value 'dog'. It has ant, bee, cat"),
        (lambda d: d.where(weight="x"), ValueError, "has no value 'x'. It has 0.0, 0.5"),
        (lambda d: d.where(eyes=3), ValueError, r"an array of shape \(4, 2\) for each sample"),
    ],
    "samplers": [
        (lambda d: SequentialSampler(-1), ValueError, "^SequentialSampler: size must be"),
        (lambda d: ShuffledSampler(2.0), ValueError, "of at least 0, not 2.0"),
        (lambda d: WeightedSampler([1], size=-1), ValueError, "size must be an integer"),
        (lambda d: ShuffledSampler(9, seed=0.5), ValueError, "seed must be an integer, not 0.5"),
        (lambda d: MixtureSampler([9, 9], [1]), ValueError, "weights must be 2 finite numbers"),
        (lambda d: MixtureSampler([9, 9], [1, -1]), ValueError, "weights must be 2 finite numbers"),
        (lambda d: MixtureSampler([9, 9], [0, 0]), ValueError, "weights are all 0"),
        (lambda d: MixtureSampler([9, 9], [1, 1e-9]), ValueError, "at least 1/10,000 of their sum"),
        (lambda d: MixtureSampler([9, 0], [1, 1]), ValueError, "data set 1 has a weight, but no"),
        (lambda d: MixtureSampler([d, d], [1, 1]), ValueError, "sizes must be an integer"),
        (lambda d: RepeatedSampler(9, 0), ValueError, "repeats must be an integer of at least 1"),
        (lambda d: WeightedSampler([]), ValueError, NO_WEIGHTS),
        (lambda d: WeightedSampler([-1, 2]), ValueError, NO_WEIGHTS),
        (lambda d: WeightedSampler([float("nan"), 1]), ValueError, NO_WEIGHTS),
        (lambda d: WeightedSampler([[1.0, 2.0]]), ValueError, NO_WEIGHTS),
        (lambda d: WeightedSampler([0, 0]), ValueError, "^weights must be .* and not all 0"),
        (lambda d: WeightedSampler.balanced([]), ValueError, NO_LABELS),
        (lambda d: WeightedSampler.balanced([-1, 2]), ValueError, NO_LABELS),
        (lambda d: WeightedSampler.balanced([0.5, 1]), ValueError, NO_LABELS),
        (ShuffledSampler, ValueError, "size must be an integer of at least 0, not MemmapDataset"),
    ],
    "prefetchers": [
        (lambda d: ThreadPrefetcher([1], 0), ValueError, "^prefetch_factor must be"),
        (lambda d: background(iter, prefetch_factor=0)([1]), ValueError, "^prefetch_factor must"),
        (lambda d: CudaPrefetcher([1], prefetch_factor=0), ValueError, "^prefetch_factor must be"),
        (lambda d: CudaPrefetcher([1], shuffle=True), ValueError, "^shuffle is for a dataset of"),
        (lambda d: CudaPrefetcher([1], transform=3), TypeError, "^transform must be a function of"),
    ],
    "fast_collate": [
        (lambda d: fast_collate([IMAGE, IMAGE[:, :1]]), ValueError, "^image 1 .* but the first"),
        (lambda d: fast_collate([IMAGE, IMAGE[0]]), ValueError, r"of shape \(8, 3\), but the"),
        (lambda d: fast_collate([STORED, STORED[..., :4]]), ValueError, "shape .*Resize or"),
        (lambda d: fast_collate([MASK, MASK[:1]]), ValueError, r"of shape \(1, 8\), but"),
        (lambda d: fast_collate([STORED, STORED.long()]), ValueError, "1 .* is torch.int64"),
        (lambda d: fast_collate([IMAGE, IMAGE.astype(int)]), ValueError, "1 of .* is int64"),
        (lambda d: fast_collate([Image.new("F", (8, 6))]), ValueError, "image 0 .* is float32"),
    ],
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(*case, id=f"{name} {number}")
        for name, cases in WRONG.items()
        for number, case in enumerate(cases)
    ],
)
def test_wrong_arguments_are_refused(path, call, error, message):
    with pytest.raises(error, match=message):
        call(MemmapDataset(path))


@pytest.mark.parametrize("option", ["transform", "target_transform", "transforms"])
def test_transforms_of_single_samples_are_refused_where_batches_or_more_data_sets_follow(
    path, option
):
    dataset = MemmapDataset(path, **{option: str})
    for wrong in (dataset, [dataset, path]):
        with pytest.raises(ValueError, match=r"made\.idx has a transform for single samples"):
            Loader(wrong)


INDICES = {
    "above": ([0, SIZE], "out of bounds"),
    "below": ([-SIZE - 1], "out of bounds"),
    "float": ([0.5], "integer"),
    "2-d": ([[1, 2]], r"indices have the shape \(1, 2\). Give a list of integers"),
    "0-d": (3, r"indices have the shape \(\)"),
    "short mask": (np.ones(SIZE - 1, bool), "boolean index did not match"),
}


@pytest.mark.parametrize(("indices", "message"), INDICES.values(), ids=INDICES)
def test_wrong_numbers_of_samples_are_refused(path, indices, message):
    dataset = MemmapDataset(path)
    for use in (dataset.subset, dataset.gather):
        with pytest.raises(IndexError, match=message):
            use(indices)
    for outside in (SIZE, -SIZE - 1, 10**30):
        with pytest.raises(IndexError):
            dataset[outside]
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError, match="integer"):
            dataset[wrong]
