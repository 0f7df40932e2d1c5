"""What is wrong is told, with its name and what was found."""

import re

import numpy as np
import pytest

import memload

WRONG = {
    "concat nothing": (lambda _: memload.concat(), ValueError, "datasets: there is none"),
    "concat a number": (
        lambda _: memload.concat(3),
        TypeError,
        "expected str, bytes or",
    ),
    "columns": (lambda ds: memload.concat(ds, columns="all"), ValueError, "'all' is neither"),
    "join nothing": (memload.join, ValueError, "nothing to join"),
    "join a name": (lambda ds: memload.join(ds, label=ds), ValueError, "meaning of its own"),
    "join a column": (
        lambda ds: memload.join(ds, age=ds),
        ValueError,
        "age: made.idx has that already",
    ),
    "missing": (lambda ds: memload.relabel(ds, "x.csv", missing="no"), ValueError, "none of"),
    "no table": (lambda ds: memload.relabel(ds, "x.csv"), memload.SourceError, "x.csv"),
    "no lines": (lambda ds: memload.relabel(ds, "x.jsonl"), memload.SourceError, "x.jsonl"),
    "where": (lambda ds: memload.where(ds, age=9), ValueError, "'age' has no value 9"),
    "where a column": (lambda ds: memload.where(ds, kind=9), ValueError, "no column 'kind'"),
    "length": (lambda ds: memload.with_columns(ds, a=[1]), ValueError, "1 values for 5 samples"),
    "name": (
        lambda ds: memload.with_columns(ds, **{"a/b": [1]}),
        ValueError,
        "a/b: its name is taken",
    ),
    "reserved": (
        lambda ds: memload.with_columns(ds, key=[1] * 5),
        ValueError,
        "key: its name is taken",
    ),
    "array": (
        lambda ds: memload.with_columns(ds, image=[1] * 5),
        ValueError,
        "image: its name is taken",
    ),
    "mixed": (lambda ds: memload.with_columns(ds, a=[1, "x", 3, 4, 5]), ValueError, "neither"),
    "large": (lambda ds: memload.with_columns(ds, a=[2**60 + 1, 0.5]), ValueError, "above 2⁵³"),
    "a text": (lambda ds: memload.with_columns(ds, a="train"), ValueError, "1 values for 5"),
    "other folder": (
        lambda ds: memload.concat(ds).write("a.idx"),
        ValueError,
        "must be in the folder of the pixels. Write '",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told(make_dataset, tmp_path, monkeypatch, case):
    index = make_dataset()
    memload.with_columns(index, age=[1, 2, 3, 4, 5]).write(index.path)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    call, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        call(index.path)
    assert not [*(tmp_path / "cwd").iterdir()]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("key,label\nant/0,\n", {"missing": "drop"}, "labels? (is|are) missing"),
        ("key,class\nant/0,\n", {"missing": "drop"}, "labels are missing"),
        ("key,label\nzebra,ant\n", {}, "names no sample of made.idx"),
        ("key,label\nant/0,ant\n", {}, "missing='drop' or 'keep'"),
        ("key,label\nant/0.jpg,ant\nant/0.jpg,bee\n", {}, "may stand for the same picture"),
        ("key,label\nant/0,ant\n", {"label": "kind"}, "no column 'kind', only .*label"),
        ("key,age\nant/0,3\n", {"missing": "keep"}, "age: the data set has no such column"),
    ],
)
def test_tables_that_do_not_fit_are_told(make_dataset, tmp_path, lines, options, message):
    (tmp_path / "table.csv").write_text(lines)
    with pytest.raises((ValueError, memload.SourceError), match=message):
        memload.relabel(make_dataset(), tmp_path / "table.csv", **options)


def test_an_index_is_written_to_a_new_file_that_is_called_so(make_dataset, tmp_path):
    index = make_dataset()
    dataset = memload.MemmapDataset(index.path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        dataset.save(index.path)
    for write_to in (dataset.save, index.write):
        with pytest.raises(ValueError, match=r"must end in '.idx'"):
            write_to(tmp_path / "made.bin")
    dataset[::2].save(index.path, overwrite=True)
    assert np.array_equal(memload.MemmapDataset(index.path).labels, [0, 2, 1])
