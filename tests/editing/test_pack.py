"""A data set of any index, built anew with files of its own."""

import numpy as np
import pytest

import memload
from memload.storage.index import Index


def pack(source, output, **options):
    memload.build(source, output, num_workers=0, progress=False, **options)
    return Index.open(output)


def test_what_was_put_together_becomes_one_data_set(
    make_dataset, add_array, rows_in, samples_in, tmp_path
):
    order = np.random.default_rng(0).permutation(5)
    for seed, name in enumerate(("a.bin", "b.bin")):
        index = make_dataset(name, rows=(2, 3), seed=seed, classes=("b", "a", f"c{seed}"))
        ids = np.full((5, 4, 6), 7 + seed, "u1")
        add_array(index, "mask", ids, "mask", other_rows={"mask": order})
    np.save(tmp_path / "f.npy", np.arange(30.0).reshape(10, 3))
    both = memload.concat(tmp_path / "a.bin", tmp_path / "b.bin")
    both = memload.with_columns(both, age=[*range(10)], code=[*"abcdefghij"])
    joined = memload.join(both, f=tmp_path / "f.npy").subset(np.array([9, 3, 3, 0]))
    samples = samples_in(joined.write(tmp_path / "all.idx").path)
    packed = pack(tmp_path / "all.idx", tmp_path / "packed.bin")
    for path in (*tmp_path.glob("a*"), *tmp_path.glob("b*"), tmp_path / "f.npy"):
        path.unlink()
    assert samples_in(packed.path) == samples
    assert packed.image.rows == 4
    assert packed.classes == both.classes
    assert packed.array("mask").kind == "mask"
    used = rows_in(packed).astype(np.float64) / 255
    assert packed.statistics["mean"] == pytest.approx(used.mean(axis=(0, 1, 2)))
    assert packed.statistics["std"] == pytest.approx(used.std(axis=(0, 1, 2)))


@pytest.mark.parametrize("descr", ["|u1", "<u2", "<i2", "<f4"])
@pytest.mark.parametrize("shape", [(4, 6, 1), (5, 3, 3), (4, 4, 7)])
def test_pixels_of_any_type_stay(make_dataset, rows_in, tmp_path, descr, shape):
    index = make_dataset(shape=shape, descr=descr)
    packed = pack(index.path, tmp_path / "packed.bin", where={"label": ["bee", "cat"]})
    assert np.array_equal(rows_in(packed), rows_in(index)[[1, 2, 4]])
    assert packed.image.descr == descr


def test_a_packed_build_is_the_same_to_the_byte(output, tmp_path):
    pack(output, tmp_path / "packed.bin")
    assert (tmp_path / "packed.bin").read_bytes() == output.read_bytes()
    found, before = (Index.open(path).statistics for path in (tmp_path / "packed.bin", output))
    assert (found["mean"], found["std"]) == (before["mean"], before["std"])
