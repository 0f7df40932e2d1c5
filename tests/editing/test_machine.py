"""Any sequence of edits, compared with a list of dicts that is edited in the same way."""

import csv
import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    multiple,
    rule,
    run_state_machine_as_test,
)

import memload
from memload.storage.keys import Keys

LABELS = st.sampled_from(["ant", "bee", "cat", "emu"])
#: The values of a column: large integers, fractions or texts. Small integers would count into the
#: texts that there are.
COLUMNS = st.sampled_from([st.integers(2**53, 2**62), st.floats(-1e9, 1e9), st.text(max_size=3)])


def kinds_of(samples):
    """Return what each column holds: text, integers, fractions or an array."""
    return {name: type(value) for name, value in samples[0].items()}


class Editing(RuleBasedStateMachine):
    """Each data set is the path of an index and a list of its samples."""

    datasets = Bundle("datasets")

    def __init__(self):
        super().__init__()
        self.folder = self.make_folder()
        self.numbers = itertools.count()

    def path(self, ending):
        return self.folder / f"{next(self.numbers)}{ending}"

    def written(self, index, samples):
        """Write an index, open it again and compare it. Returns path and samples."""
        path = self.path(".idx")
        index.write(path)
        assert self.samples_in(path) == samples
        return path, samples

    def edited(self, edit, is_wrong, samples):
        """Return what a rule returns: a data set, or nothing for an edit that has to fail."""
        if is_wrong:
            with pytest.raises(ValueError):  # noqa: PT011  # the messages are in other tests
                edit()
            return multiple()
        return self.written(edit(), samples)

    @rule(
        target=datasets, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2), data=st.data()
    )
    def build(self, sizes, data):
        number, count = next(self.numbers), sum(sizes)
        labels = [data.draw(LABELS) for _ in range(count)]
        classes = sorted({*labels})
        index = self.write_dataset(
            self.folder,
            f"{number}.bin",
            rows=sizes,
            seed=number,
            keys=Keys.of([f"{label}/{number}_{row}.jpg" for row, label in enumerate(labels)]),
            columns={"label": np.array([classes.index(label) for label in labels])},
            classes=tuple(classes),
        )
        samples = self.samples_in(index.path)
        assert [sample["label"] for sample in samples] == labels
        return index.path, samples

    @rule(
        target=datasets,
        first=datasets,
        second=datasets,
        columns=st.sampled_from(["same", "common"]),
    )
    def concat(self, first, second, columns):
        kinds = [kinds_of(samples) for _, samples in (first, second)]
        common = [name for name in kinds[0] if kinds[0].get(name) == kinds[1].get(name)]
        arrays = [[n for n, kind in found.items() if kind is bytes] for found in kinds]
        is_wrong = arrays[0] != arrays[1] or (columns == "same" and kinds[0] != kinds[1])
        samples = [{name: one[name] for name in common} for one in (*first[1], *second[1])]
        return self.edited(
            lambda: memload.concat(first[0], second[0], columns=columns), is_wrong, samples
        )

    @rule(target=datasets, dataset=datasets, data=st.data())
    def where(self, dataset, data):
        path, samples = dataset
        label = data.draw(st.sampled_from(sorted({sample["label"] for sample in samples})))
        index = memload.where(memload.MemmapDataset(path), label=label)
        return self.written(index, [sample for sample in samples if sample["label"] == label])

    @rule(dataset=datasets)
    def pack(self, dataset):
        path, samples = dataset
        packed = self.path(".bin")
        memload.build(path, packed, num_workers=0, progress=False)
        assert self.samples_in(packed) == samples

    @rule(target=datasets, dataset=datasets, data=st.data())
    def save(self, dataset, data):
        path, samples = dataset
        chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=6))
        saved = self.path(".idx")
        memload.MemmapDataset(path).subset(chosen).save(saved)
        assert self.samples_in(saved) == [samples[number] for number in chosen]
        return saved, [samples[number] for number in chosen]

    @rule(target=datasets, dataset=datasets, name=st.sampled_from(["a", "b"]), data=st.data())
    def with_columns(self, dataset, name, data):
        path, samples = dataset
        kind = data.draw(COLUMNS)
        values = [data.draw(kind) for _ in samples]
        changed = [{**one, name: value} for one, value in zip(samples, values, strict=True)]
        return self.edited(
            lambda: memload.with_columns(path, **{name: values}),
            type(samples[0].get(name)) is bytes,
            changed,
        )

    @rule(target=datasets, dataset=datasets, data=st.data())
    def relabel(self, dataset, data):
        path, samples = dataset
        images = {sample["key"]: sample["image"] for sample in samples}
        missing = data.draw(st.sampled_from(["error", "drop", "keep"]))
        chosen = data.draw(st.sets(st.sampled_from(sorted(images)), min_size=1))
        labels = {key: data.draw(LABELS) for key in sorted(chosen)}
        table = self.table(labels, data.draw(st.sampled_from([".csv", ".tsv", ".jsonl"])))
        are_unclear = any(images[sample["key"]] != sample["image"] for sample in samples)
        changed = [
            {**sample, "label": labels.get(sample["key"], sample["label"])}
            for sample in samples
            if missing == "keep" or sample["key"] in chosen
        ]
        return self.edited(
            lambda: memload.relabel(path, table, missing=missing),
            are_unclear or (missing == "error" and len(chosen) < len(images)),
            changed,
        )

    def table(self, labels, ending):
        path = self.path(ending)
        with path.open("w", newline="") as file:
            if ending == ".jsonl":
                file.writelines(
                    json.dumps({"file_name": key, "label": label}) + "\n"
                    for key, label in labels.items()
                )
            else:
                writer = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
                writer.writerows([("key", "label"), *labels.items()])
        return path

    @rule(target=datasets, dataset=datasets, name=st.sampled_from(["f", "g", "a"]))
    def join(self, dataset, name):
        path, samples = dataset
        file = self.path(".npy")
        values = np.random.default_rng(int(file.stem)).standard_normal((len(samples), 2))
        np.save(file, values)
        joined = [{**s, name: row.tobytes()} for s, row in zip(samples, values, strict=True)]
        return self.edited(lambda: memload.join(path, **{name: file}), name in samples[0], joined)


@pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_edits_do_to_data_sets_what_they_do_to_a_list_of_dicts(
    write_dataset, samples_in, tmp_path, examples
):
    folders = itertools.count()

    def make_folder():
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        return folder

    class Machine(Editing):
        pass

    Machine.make_folder = staticmethod(make_folder)
    Machine.write_dataset = staticmethod(write_dataset)
    Machine.samples_in = staticmethod(samples_in)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )
