"""The files of a data set: the format, the index and the shards."""
