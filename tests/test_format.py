"""The bytes on disk: golden ones, and a reader that knows nothing but the specification."""

import json
import struct
import zlib
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

import memload
from memload.format import index_path, npy_header, output_paths, shard_names
from memload.index import Array, Index, Shard
from memload.keys import Keys

# The least data set that has one of everything: two rows, three samples, a class, a column, points, a flag.
PIXELS = bytes(range(1, 13))
METADATA = (
    b'{"arrays":[{"descr":"|u1","name":"image","shape":[1,2,3],'
    b'"shards":[{"bytes":4108,"file":"tiny.bin","rows":2}]}],'
    b'"build":{"memload":"0"},"classes":["caf\\u00e9","\\udc80"],'
    b'"fingerprint":"4ab02aff4a6d8cd6b1d4d8b7bb0ef5ce4ff4bbdd2ae0cb3d5f60dcb4d0b58e9c","format_version":1,'
    b'"points":["eyes"],"samples":3,"statistics":{"mean":[0.5]},'
    b'"tensors":{"crc32/image":{"crc32":1111,"dtype":"<u4","shape":[2]}}}'
)


def tiny(folder: Path) -> Index:
    (folder / "tiny.bin").write_bytes(npy_header("|u1", (2, 1, 2, 3)) + PIXELS)
    return Index(
        path=folder / "tiny.idx",
        arrays=(Array("image", "|u1", (1, 2, 3), (Shard("tiny.bin", 2, 4108),)),),
        row=np.array([1, 0, 1]),
        flags=np.array([0, 1, 4], np.uint8),
        keys=Keys.of(["a/1", "", "b\udc80"]),
        columns={"label": np.array([0, 1, 0]), "eyes": np.array([[[0.5, 0]], [[1, -1]], [[2, 0]]], np.float32)},
        crc32={"image": np.array([zlib.crc32(PIXELS[:6]), zlib.crc32(PIXELS[6:])], np.uint32)},
        classes=("café", "\udc80"),
        points=("eyes",),
        build={"memload": "0"},
        statistics={"mean": [0.5]},
    )
