"""What damages files."""


def flip(path, *positions):
    """Change a bit of the bytes at these positions. Returns the path."""
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 1
    path.write_bytes(data)
    return path
