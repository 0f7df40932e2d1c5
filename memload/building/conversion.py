"""Converts one sample of a source: its rows, and the record that the journal keeps of them."""

import zlib

import numpy as np

from memload.building.options import Options
from memload.building.record import DONE, crc32_field, set_columns
from memload.building.settings import Settings
from memload.errors import BuildError, DecodeError, describe_error
from memload.sources.samples import Sample, Source

#: A reason is cut to this many characters, as an exception may quote a whole file.
_MAX_REASON = 1000


class Conversion:
    """How the samples of a source become rows, and by how many processes (0: by this one)."""

    def __init__(self, source: Source, settings: Settings, options: Options) -> None:
        self.source, self.settings = source, settings
        self.num_workers = min(options.num_workers, len(source))  # others have nothing to do
        self.timeout, self.is_of_files = options.timeout, options.is_of_files
        # A worker ignores SIGINT. So a KeyboardInterrupt there comes from the user's code, and
        # rejects the sample, like any other exception.
        self.sample_errors = BaseException if self.num_workers else Exception
        self.schema = source.schema
        self.points = [name for name, column in self.schema.items() if column.points]
        self.boxes = [name for name, column in self.schema.items() if column.boxes]
        texts = {**source.categories, "label": source.classes}
        #: how many texts the columns of labels and categories count into
        self.num_texts = {name: len(names) for name, names in texts.items() if names is not None}
        self.extra_arrays = [array.name for array in settings.extra_arrays]

    def convert(
        self, row: int, record: np.void, sample: Sample | Exception | None = None
    ) -> tuple[list[np.ndarray], str]:
        """Convert a sample and fill its record.

        Returns its rows, one for each array, or why it cannot be used. Raises BuildError if this
        process or machine lacks something.
        """
        try:
            if sample is None:
                sample = self.source[row]
            if isinstance(sample, Exception):
                raise sample
            for name in self.extra_arrays:
                record[f"is_missing/{name}"] = sample.arrays.get(name) is None
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
        record["size"], record["remarks"] = converted.source_size, converted.remarks
        record["total"], record["squares"] = converted.sums
        if (origin := self.settings.origin) is None:
            record["crc32"] = zlib.crc32(converted.pixels.data)
        else:  # reading has compared the pixels with their checksum
            record["crc32"] = origin.crc32[row]
            record["flags"] |= origin.flags[row]
        for name, content in zip(self.extra_arrays, converted.extra_arrays, strict=True):
            record[crc32_field(name)] = zlib.crc32(content.data)
        return [converted.pixels, *converted.extra_arrays], ""
