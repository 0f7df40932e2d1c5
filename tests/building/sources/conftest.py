"""The same pictures in every kind of container."""

import csv
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def _jpeg(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    file = io.BytesIO()
    small.resize((40 + seed, 36), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class Containers:
    """Thirty pictures, ``ant/00.jpg`` to ``cat/29.jpg``, and functions that write them to files.

    ``label`` has the number of the class, ``age`` a number, and ``split`` one of two texts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = {
            f"{CLASSES[number // 10]}/{number:02d}.jpg": _jpeg(number) for number in range(30)
        }
        self.labels = [number // 10 for number in range(30)]
        self.ages = [number / 4 for number in range(30)]
        self.splits = ["val" if number % 5 == 0 else "train" for number in range(30)]

    def directory(self) -> Path:
        root = self.folder / "images"
        for name, content in self.pictures.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return root

    def table(self, name: str = "images.csv", delimiter: str = ",") -> Path:
        path = self.folder / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["image", "label", "age", "split"])
            for name, age, split in zip(self.pictures, self.ages, self.splits, strict=True):
                writer.writerow([f"images/{name}", name[:3], age, split])
        return path

    def tar(
        self, name: str = "images.tar", numbers: Any = range(30), *, labels: bool = True
    ) -> Path:
        path = self.folder / name
        items = list(self.pictures.items())
        with tarfile.open(path, "w") as file:
            for number in numbers:
                key, content = items[number]
                facts = {"age": self.ages[number], "split": self.splits[number]}
                parts = {"jpg": content}
                if labels:
                    parts |= {"cls": key[:3].encode(), "json": json.dumps(facts).encode()}
                stem = f"{number:06d}" if labels else key.removesuffix(".jpg")
                for extension, data in parts.items():
                    member = tarfile.TarInfo(f"{stem}.{extension}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        return path

    def zip(self, name: str = "images.zip", compression: int = zipfile.ZIP_STORED) -> Path:
        path = self.folder / name
        with zipfile.ZipFile(path, "w", compression) as file:
            for key, content in self.pictures.items():
                file.writestr(f"images/{key}", content)
        return path

    def parquet(self, name: str = "images.parquet", **options: Any) -> Path:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        path = self.folder / name
        table = pyarrow.table(
            {
                "image": [{"bytes": data, "path": key} for key, data in self.pictures.items()],
                "label": [key[:3] for key in self.pictures],
                "age": self.ages,
                "split": self.splits,
            }
        )
        parquet.write_table(table, path, **{"row_group_size": 7, **options})
        return path


@pytest.fixture
def containers(tmp_path: Path) -> Containers:
    return Containers(tmp_path)
