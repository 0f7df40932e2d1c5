"""From pictures to files: decode, resize and write, resumably."""
