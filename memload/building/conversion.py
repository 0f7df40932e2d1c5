"""Converts one sample of a source: its rows, and the record that the journal keeps of them."""

import zlib

import numpy as np

from memload.building.record import (
    DONE,
    crc32_field,
    names_of_boxes,
    names_of_points,
    set_columns,
)
from memload.building.settings import AnySettings, StoredSettings
from memload.errors import BuildError, DecodeError, describe_error
from memload.sources.samples import Record, Source

#: A reason is cut to this many characters, as an exception may quote a whole file.
_MAX_REASON = 1000


class Conversion:
    """How the samples of a source become rows, and by how many processes (0: by this one).

    ``timeout`` is in seconds for one row. ``prints`` says whether the source runs code of the
    user's, whose output is shown.
    """

    def __init__(
        self,
        source: Source,
        settings: AnySettings,
        num_workers: int,
        timeout: float,
        *,
        prints: bool,
    ) -> None:
        self.source, self.settings = source, settings
        self.num_workers, self.timeout, self.prints = num_workers, timeout, prints
        # A worker ignores SIGINT. So a KeyboardInterrupt there comes from the user's code, and
        # rejects the sample, like any other exception.
        self.sample_errors = BaseException if num_workers else Exception
        self.schema = source.schema
        self.points, self.boxes = names_of_points(self.schema), names_of_boxes(self.schema)
        texts = {**source.categories, "label": source.classes}
        #: how many texts the columns of labels and categories count into
        self.num_texts = {name: len(names) for name, names in texts.items() if names is not None}

    def convert(
        self, row: int, record: np.void, sample: Record | Exception | None = None
    ) -> tuple[list[bytes | memoryview], str]:
        """Convert a sample and fill its record.

        Returns its rows, one for each array, or why it cannot be used. Raises BuildError if this
        process or machine lacks something.
        """
        try:
            if sample is None:
                sample = self.source[row]
            if isinstance(sample, Exception):
                raise sample
            for array in self.settings.extra_arrays:
                record[f"is_missing/{array.name}"] = sample.arrays.get(array.name) is None
            converted = self.settings.convert(sample, self.points, self.boxes)
            set_columns(record, self.schema, converted.columns)
            for name, count in self.num_texts.items():
                number = record[f"column/{name}"]
                if not 0 <= number < count:
                    raise DecodeError(f"{name} {number} is not within 0 to {count - 1}")
        except BuildError:
            raise
        except MemoryError as error:
            raise BuildError(
                f"There is not enough memory to convert {self.source.keys[row]}. Free some, or use "
                "fewer workers (--num-workers), then run the same command again: it goes on where "
                "it stopped."
            ) from error
        except self.sample_errors as error:  # a data set's own code may raise anything
            reason = describe_error(error)
            if isinstance(error, DecodeError):
                reason = str(error.reason) or "no reason was given"
            return [], reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…"
        record["status"], record["flags"] = DONE, converted.flags
        crc32 = {}
        if isinstance(self.settings, StoredSettings):  # reading has compared the pixels with it
            record["flags"] |= self.settings.flags[row]
            crc32["image"] = self.settings.crc32[row]
        record["size"], record["remarks"] = converted.source_size, converted.remarks
        record["total"], record["squares"] = converted.total, converted.squares
        for array, extra in zip(self.settings.extra_arrays, converted.extra_arrays, strict=True):
            record[f"ids/{array.name}"] = extra.ids
        rows: list[bytes | memoryview] = [
            converted.pixels,
            *(extra.data for extra in converted.extra_arrays),
        ]
        names = ["image", *(array.name for array in self.settings.extra_arrays)]
        for name, content in zip(names, rows, strict=True):
            record[crc32_field(name)] = crc32[name] if name in crc32 else zlib.crc32(content)
        return rows, ""
