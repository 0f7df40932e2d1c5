"""Damaged and malicious data sets, drawn at random: ``python -m tests.storage.fuzz --seconds 60 --keep FOLDER``.

Each is given to all that reads a data set. It must be read or refused with FormatError, quickly and in little memory,
without opening a file elsewhere and without unpickling. What breaks that is kept in FOLDER and told in the end.
"""

import argparse
import contextlib
import gc
import hashlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import memload
from memload.building.workers import limit_memory
from memload.cli import main as command_line
from memload.errors import FormatError
from memload.storage.format import npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys
from memload.storage.shards import Shards

#: What a data set of a few kilobytes may take of the processor's time, in seconds, and of memory, in bytes.
SECONDS, BYTES = 5.0, 64 << 20

#: Texts that stand for what no writer of JSON writes.
RAW = {
    "@1e999@": "1e999",
    "@digits@": "9" * 5000,
    "@minus@": "-0",
    "@fraction@": "5.0",
    "@comma@": "1,",
    "@end@": "1}",
}
NUMBERS = [0, 1, -1, 2, 5, 64, 4096, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
TEXTS = [
    "", "a", ".", "..", "../made.bin", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "\0", "a\0b", "\ud800",
    "\udcff", "made.idx", "made.bin", "made-00000-of-00002.bin", "x" * 300, "é" * 200, "|O", "|O8", ">i8", "<i8", "|u1",
    "<f4", "<U9", "|V8", "I64", "U8", "F64", "BF16", "F8_E4M3", "row", "flags", "key", "key/bytes", "key/offsets",
    "crc32/image", "image", "label", "__metadata__", "format_version", "cos\nsystem\n(S'id'\ntR.", "\x1b[31m", "{}",
]  # fmt: skip
VALUES: list[Any] = [
    *NUMBERS, *(-number for number in NUMBERS[1:]), 10**30, 0.5, 1e308, -0.0, float("nan"), float("inf"), True, False,
    None, [], {}, [[]], [0] * 65, [1] * 70, [0, 2**62, 2**62], {"a": 1}, json.loads("[" * 70 + "]" * 70),
    json.loads("[" * 600 + "]" * 600), *RAW, *TEXTS,
]  # fmt: skip


def data_sets(folder: Path) -> list[Path]:
    """Write sound data sets to begin with, each in a folder of its own, and return their indexes."""
    return [
        _data_set(
            folder / "plain",
            (5,),
            (4, 6, 3),
            "|u1",
            {"label": np.arange(5) % 3},
            ("ant", "bee", "cat"),
        ),
        _data_set(
            folder / "shards",
            (3, 2),
            (2, 2, 1),
            "<f4",
            {"label": np.arange(5) % 3},
            ("ant", "bee", "cat"),
        ),
        _data_set(
            folder / "columns",
            (4,),
            (3, 3, 3),
            "<u2",
            {
                "eyes": np.linspace(0, 3, 16, dtype=np.float32).reshape(4, 2, 2),
                "weight": np.arange(4.0),
                "good": np.array([True, False, True, True]),
                "half": np.arange(4, dtype=np.float16),
            },
            None,
            points=("eyes",),
        ),
        _data_set(
            folder / "empty",
            (1,),
            (1, 1, 1),
            "|u1",
            {"label": np.zeros(1, np.int64)},
            ("ant",),
            samples=0,
        ),
    ]


def _data_set(
    folder: Path,
    rows: tuple[int, ...],
    shape: tuple[int, int, int],
    descr: str,
    columns: dict[str, np.ndarray],
    classes: tuple[str, ...] | None,
    *,
    points: tuple[str, ...] = (),
    samples: int | None = None,
) -> Path:
    folder.mkdir()
    total, shards, checks = sum(rows), [], []
    pixels = np.random.default_rng(0).integers(0, 256, (total, *shape)).astype(descr)
    for number, part in enumerate(np.split(pixels, np.cumsum(rows)[:-1])):
        file = "made.bin" if len(rows) == 1 else f"made-{number:05d}-of-{len(rows):05d}.bin"
        (folder / file).write_bytes(npy_header(descr, part.shape) + part.tobytes())
        shards.append(Shard(file, len(part), 4096 + part.nbytes))
        checks += [zlib.crc32(row.tobytes()) for row in part]
    index = Index(
        path=folder / "made.idx",
        arrays=(Array("image", descr, shape, tuple(shards)),),
        row=np.arange(total),
        flags=np.zeros(total, np.uint8),
        keys=Keys.of([f"{row}.jpg" for row in range(total)]),
        columns=columns,
        crc32={"image": np.array(checks, np.uint32)},
        classes=classes,
        points=points,
        build={"rejected": 0},
        statistics={"mean": [0.5] * shape[2], "std": [0.25] * shape[2], "source_width": [1, 2]},
    )
    index = index if samples is None else index.subset(np.arange(samples))
    return replace(index, build={"rejected": 0}).write(index.path).path


# ---- what is done to a data set


def damaged(rng: random.Random, folder: Path) -> None:
    """Alter the index or a shard of the data set in a folder."""
    shards = sorted(folder.glob("*.bin"))
    if rng.random() < 0.15:
        path = rng.choice(shards)
        path.write_bytes(_bytes(rng, path.read_bytes(), 4200))
        return
    path = folder / "made.idx"
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    kind = rng.random()
    if kind < 0.2:
        path.write_bytes(_bytes(rng, data, len(data)))
        return
    header, tensors = json.loads(data[8:length]), data[length:]
    metadata = json.loads(header["__metadata__"]["memload"])
    if kind < 0.45:  # as safetensors sees it
        for _ in range(rng.randint(1, 3)):
            header = _value(rng, header)
    else:
        if kind < 0.75:  # as memload sees it
            for _ in range(rng.randint(1, 3)):
                metadata = _value(rng, metadata)
        else:  # what is in the tensors, whose checksums are right
            tensors = _bytes(rng, tensors, len(tensors), same_size=rng.random() < 0.9)
        if isinstance(metadata, dict):
            if rng.random() < 0.8:
                _check(metadata, header, tensors)
            _sign(metadata)
        header["__metadata__"]["memload"] = _text(rng, metadata)
    with contextlib.suppress(RecursionError):
        text = _text(rng, header).encode("utf-8", "surrogatepass")
        path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def _bytes(rng: random.Random, data: bytes, within: int, same_size: bool = False) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(1, min(within, len(found))))
        part = (
            rng.randbytes(8)
            if rng.random() < 0.5
            else (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
        )
        part = part[: rng.choice([1, 4, 8])]
        kind = rng.randrange(3 if same_size else 6)
        if kind == 0 and found:
            found[min(place, len(found) - 1)] ^= 1 << rng.randrange(8)
        elif kind in (1, 2):
            end = min(place // 8 * 8 if kind == 1 else place, len(found) - len(part))
            found[max(0, end) : max(0, end) + len(part)] = part[: len(found)]
        elif kind == 3:
            del found[place:]
        elif kind == 4:
            found[place:place] = part
        else:
            found[place:place] = found[place : place + rng.randrange(1, 100)]
    return bytes(found)


def _value(rng: random.Random, value: Any) -> Any:
    """Return a value of JSON with a part of it replaced, removed, repeated or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.75:
            return value | {name: _value(rng, value[name])}
        if kind < 0.85:
            return {key: inner for key, inner in value.items() if key != name}
        return value | {
            rng.choice(TEXTS): value[name] if rng.random() < 0.5 else rng.choice(VALUES)
        }
    if isinstance(value, list) and value and rng.random() < 0.9:
        place, kind = rng.randrange(len(value)), rng.random()
        if kind < 0.7:
            return [*value[:place], _value(rng, value[place]), *value[place + 1 :]]
        if kind < 0.8:
            return value[:place] + value[place + 1 :]
        return [*value, value[place] if rng.random() < 0.5 else rng.choice(VALUES)]
    if isinstance(value, int) and rng.random() < 0.3:
        return rng.choice(
            [value + 1, value - 1, -value, value * 2, value + 2**32, value + 2**64, str(value)]
        )
    return rng.choice(VALUES)


def _check(metadata: dict[str, Any], header: dict[str, Any], tensors: bytes) -> None:
    """Make the checksums of the tensors right."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        for name, entry in metadata["tensors"].items():
            start, stop = header[name]["data_offsets"]
            entry["crc32"] = zlib.crc32(tensors[start:stop])


def _sign(metadata: dict[str, Any]) -> None:
    """Make the fingerprint right."""
    with contextlib.suppress(ValueError, RecursionError):
        rest = {key: value for key, value in metadata.items() if key != "fingerprint"}
        read = json.loads(_raw(json.dumps(rest)))
        canonical = json.dumps(read, sort_keys=True, separators=(",", ":"))
        metadata["fingerprint"] = hashlib.sha256(canonical.encode()).hexdigest()


def _text(rng: random.Random, value: Any) -> str:
    with contextlib.suppress(RecursionError):
        text = _raw(json.dumps(value, ensure_ascii=rng.random() < 0.8))
        if rng.random() < 0.05:  # a key that is there twice
            found = list(re.finditer(r'"[^"\\]{1,20}":', text))
            if found:
                again = rng.choice(found).group()
                text = "{" + f"{again}{_raw(json.dumps(rng.choice(VALUES)))}," + text[1:]
        return text
    return "[" * 5000


def _raw(text: str) -> str:
    for name, meant in RAW.items():
        text = text.replace(f'"{name}"', meant)
    return text


# ---- what must hold


class BrokenError(AssertionError):
    """A promise that was not kept."""


#: What the audit hook has seen of files that are opened and classes that are unpickled; None while nobody looks.
_seen: list[tuple[str, str]] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in (
        "open",
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "socket.connect",
    ):
        what = arguments[0]
        _seen.append((event, os.fsdecode(what) if isinstance(what, bytes) else str(what)))


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise BrokenError if a file outside of a folder is opened, or anything is unpickled."""
    global _seen  # noqa: PLW0603  # an audit hook cannot be taken out again
    if _audit not in _installed:
        sys.addaudithook(_audit)
        _installed.append(_audit)
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    for event, what in seen:
        if event != "open" or not _inside(what, folder):
            raise BrokenError(f"{event}: {what}")


_installed: list[object] = []


def _inside(path: str, folder: Path) -> bool:
    if path.isdigit():  # a descriptor, which was opened before
        return True
    return (
        Path(os.path.normpath(folder / path)).parent == folder
        and Path(path).resolve().parent == folder.resolve()
    )


def readers(path: Path) -> dict[str, Callable[[], object]]:
    """Return all that reads the data set with the index ``path``; each raises FormatError or nothing."""
    return {
        "Index": lambda: _read_index(path),
        "Shards": lambda: [pixels.sum() for pixels in Shards(Index.open(path)).maps],
        "MemmapDataset": lambda: _read_data_set(path),
        "info": lambda: memload.info(path),
        "verify": lambda: memload.verify(path, num_threads=1),
        "preview": lambda: (
            memload.preview(path, path.with_suffix(".png"), tile=8)
            if len(Index.open(path))
            else None
        ),
        "memload info": lambda: _run("info", str(path)),
        "memload info --json": lambda: _run("info", str(path), "--json"),
        "memload verify": lambda: _run("verify", str(path), "--num-threads", "1"),
    }


def _read_index(path: Path) -> None:
    index = Index.read(path)
    with contextlib.suppress(FormatError):
        index.check_tensors()
    with contextlib.suppress(FormatError):
        index.keys.check()
    with contextlib.suppress(FormatError):
        index.subset(np.arange(len(index))[::-2])
    for number in range(min(len(index), 10)):
        with contextlib.suppress(FormatError):
            repr(index.keys[number])


def _read_data_set(path: Path) -> None:
    dataset = memload.MemmapDataset(path)
    repr(dataset)
    for position in range(min(len(dataset), 10)):
        dataset[position]
    dataset.gather(np.arange(min(len(dataset), 10)))
    dataset[: len(dataset) // 2].labels  # noqa: B018


#: What a command prints; always the same two, as click keeps every stream that it has printed to.
_said, _told = io.StringIO(), io.StringIO()


def _run(*arguments: str) -> None:
    for stream in (_said, _told):
        stream.seek(0)
        stream.truncate()
    status: object = 0
    with contextlib.redirect_stdout(_said), contextlib.redirect_stderr(_told):
        try:
            command_line(list(arguments))
        except SystemExit as ended:
            status = ended.code
    lines = _told.getvalue().splitlines()
    if (
        status not in (0, 1)
        or (status == 1 and not lines)
        or not all(line.startswith("memload: ") for line in lines)
    ):
        raise BrokenError(f"memload {arguments[0]} ended with {status} and told {lines}")


def opens(path: Path) -> bool:
    """Say whether the data set can be opened."""
    try:
        memload.MemmapDataset(path)
    except FormatError:
        return False
    return True


def exercise(path: Path) -> None:
    """Give a data set to all readers. Raises BrokenError, naming the folder, the reader and what it did."""
    for name, read in readers(path).items():
        started = time.process_time()
        try:
            with watched(path.parent):
                read()
        except FormatError as error:
            if str(path.parent) not in str(error):
                raise BrokenError(
                    f"{path.parent.name}: {name}: the error names no file: {error}"
                ) from error
        except Exception as error:
            raise BrokenError(
                f"{path.parent.name}: {name}: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        taken = time.process_time() - started
        if taken > SECONDS:
            raise BrokenError(f"{path.parent.name}: {name}: took {taken:.1f} s")


def draw(rng: random.Random, sound: list[Path], folder: Path) -> Path:
    """Put one of the sound data sets into a folder, altered; return its index."""
    for path in folder.iterdir():
        path.unlink()
    source = rng.choice(sound).parent
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damaged(rng, folder)
    return folder / "made.idx"


def main() -> int:
    """Draw and exercise data sets for a while. Return 1 if one of them broke a promise."""
    options = argparse.ArgumentParser(prog="python -m tests.storage.fuzz", description=__doc__)
    options.add_argument("--seconds", type=float, default=60, help="how long; 60 by default")
    options.add_argument(
        "--seed", type=int, help="to draw the same again; at random by default, and told"
    )
    options.add_argument("--keep", type=Path, help="folder for what broke a promise")
    chosen = options.parse_args()
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(2**32)
    rng, end = random.Random(seed), time.monotonic() + chosen.seconds
    count = opened = 0
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "drawn"
        folder.mkdir()
        sound = data_sets(Path(name))
        for path in sound:  # what is loaded on first use is loaded now
            for read in readers(path).values():
                read()
            path.with_suffix(".png").unlink(missing_ok=True)
        limit_memory(1 << 30)
        before = _peak()
        while time.monotonic() < end:
            path = draw(rng, sound, folder)
            count += 1
            try:
                exercise(path)
                opened += opens(path)
            except BrokenError as error:
                told = re.sub(r"[0-9]+", "N", str(error))
                if told not in broken and chosen.keep:
                    place = chosen.keep / f"{seed}-{count}"
                    place.mkdir(parents=True)
                    for file in folder.iterdir():
                        (place / file.name).write_bytes(file.read_bytes())
                broken.setdefault(told, f"seed {seed}, number {count}")
        gc.collect()
        grown = _peak() - before
    for told, where in broken.items():
        print(f"{told} ({where})")
    print(
        f"seed {seed}: {count:,} data sets, {opened:,} of them read and the others refused, {len(broken)} broken "
        f"promises; peak memory grew by {grown / 1e6:.0f} MB"
    )
    return 1 if broken or grown > BYTES else 0


def _peak() -> int:
    """Return how much memory this process had at most, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


if __name__ == "__main__":
    sys.exit(main())
