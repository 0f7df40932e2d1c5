"""Data sets one after another: files, statistics and what has to agree."""

import logging
from dataclasses import replace

import numpy as np
import pytest

import memload


def statistics(mean, std):
    return {"mean": [mean] * 3, "std": [std] * 3, "source_width": [10, 20]}


def test_files_are_named_once_and_rows_of_several_files_move(make_dataset, samples_in, tmp_path):
    first = make_dataset("a.bin", rows=(2, 3))
    second = make_dataset("b.bin", rows=(1, 2), seed=1)
    both = memload.concat(second, first, first.subset(np.array([4, 0]))).write(tmp_path / "all.idx")
    assert [shard.file[:1] for shard in both.shards] == ["b", "b", "a", "a"]
    again = memload.concat(first, both)
    expected = samples_in(first.path) + samples_in(tmp_path / "all.idx")
    assert samples_in(again.write(tmp_path / "again.idx").path) == expected
    assert memload.verify(tmp_path / "again.idx").ok


def test_mean_and_deviation_are_those_of_all_rows(make_dataset):
    first = make_dataset("a.bin", rows=(1,), statistics=statistics(0.2, 0.0))
    second = make_dataset("b.bin", rows=(3,), statistics=statistics(0.6, 0.0))
    united = memload.concat(first, second).statistics
    values = np.array([0.2, 0.6, 0.6, 0.6])
    assert united["mean"] == pytest.approx([values.mean()] * 3)
    assert united["std"] == pytest.approx([values.std()] * 3)
    assert "source_width" not in united
    assert united["class_counts"] == [2, 1, 1]
    unknown = replace(second, statistics={})
    assert {*memload.concat(first, unknown).statistics} == {"class_counts"}


def test_classes_are_united_by_name_in_the_order_of_their_appearance(make_dataset):
    first = make_dataset("a.bin", classes=("cat", "ant", "bee"))
    second = make_dataset("b.bin", classes=("dog", "cat", "eel"), seed=1)
    united = memload.concat(first, second)
    assert united.classes == ("cat", "ant", "bee", "dog", "eel")
    assert united.columns["label"].tolist() == [0, 1, 2, 0, 1, 3, 0, 4, 3, 0]


def test_names_that_occur_twice_and_labels_without_names_are_logged(make_dataset, caplog):
    index = make_dataset(classes=None)
    memload.concat(index, index)
    assert "5 names had a sample before: ant/0.jpg, bee/1.jpg, cat/2.jpg, …" in caplog.text
    assert "labels have no names of classes" in caplog.text


def test_columns_that_differ_are_named_or_left_out(make_dataset):
    first = memload.with_columns(make_dataset("a.bin"), age=[1] * 5, pose=np.zeros((5, 2), "f4"))
    second = memload.with_columns(make_dataset("b.bin", seed=1), age=[0.5] * 5)
    with pytest.raises(
        ValueError, match=r"differ in 'age': int64 in a.idx, float64 in b.idx.*=\['label'\]"
    ):
        memload.concat(first, second)
    assert [*memload.concat(first, second, columns="common").columns] == ["label"]


def test_labels_with_and_without_names_are_not_mixed(make_dataset):
    first, second = make_dataset("a.bin"), make_dataset("b.bin", classes=None, seed=1)
    with pytest.raises(ValueError, match=r"'label': text in a.idx, int64 in b.idx"):
        memload.concat(first, second)


@pytest.mark.parametrize("columns", ["same", "common"])
def test_arrays_must_be_alike(make_dataset, add_array, columns):
    first = make_dataset("a.bin")
    for other, found in (
        (make_dataset("b.bin", shape=(4, 5, 3)), "image uint8 4×5×3"),
        (make_dataset("c.bin", descr="<u2"), "image uint16 4×6×3"),
        (
            add_array(make_dataset("d.bin"), "depth", np.zeros((5, 2))),
            "'depth': missing in a.idx, array float64 2",
        ),
    ):
        with pytest.raises(ValueError, match=found):
            memload.concat(first, other, columns=columns)


def test_an_outdated_index_over_the_same_file_is_refused(make_dataset):
    old, new = make_dataset(), make_dataset(seed=1)
    with pytest.raises(ValueError, match="of a former build"):
        memload.concat(new, old)


def test_files_of_other_folders_are_read_but_not_written(make_dataset, write_dataset, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_dataset(tmp_path / "other", "b.bin", seed=1)
    united = memload.concat(make_dataset("a.bin"), other)
    with pytest.raises(ValueError, match="hard links"):
        united.write(tmp_path / "all.idx")
    dataset = memload.MemmapDataset([tmp_path / "a.bin", other.path])
    assert len(dataset.gather([9, 0])) == 2


def test_columns_left_out_are_no_news_for_readers_of_a_list(make_dataset, caplog):
    caplog.set_level(logging.INFO)
    make_dataset("a.bin")
    index = make_dataset("b.bin", seed=1)
    memload.with_columns(index, age=[1] * 5).write(index.path)
    dataset = memload.MemmapDataset([index.path.with_name("a.bin"), index.path], columns=["label"])
    assert dataset.sample_names == ("label",)
    assert not caplog.text


def test_a_file_is_looked_for_under_the_name_of_the_index(
    make_dataset, add_array, samples_in, tmp_path
):
    index = add_array(make_dataset("out.bin", rows=(2, 3)), "f", np.zeros((5, 2)))
    samples = samples_in(index.path)
    for path in [*tmp_path.iterdir()]:
        path.rename(path.with_name(path.name.replace("out", "my.photos")))
    assert samples_in(tmp_path / "my.photos.bin") == samples
    assert memload.MemmapDataset(tmp_path / "my.photos.bin").fingerprint == index.fingerprint
    assert memload.verify(tmp_path / "my.photos.idx").ok
    memload.concat(tmp_path / "my.photos.bin").write(tmp_path / "saved.idx")
    assert samples_in(tmp_path / "saved.idx") == samples
    make_dataset("my.photos-00001-of-00002.bin", rows=(3,), seed=1)
    (tmp_path / "my.photos-00001-of-00002.idx").unlink()
    with pytest.raises(memload.FormatError, match="damaged or belongs to another"):
        memload.MemmapDataset(tmp_path / "my.photos.idx")
    (tmp_path / "my.photos-00001-of-00002.bin").unlink()
    with pytest.raises(memload.MissingError, match=r"out-00001-of-00002.bin is missing"):
        memload.MemmapDataset(tmp_path / "my.photos.idx")
