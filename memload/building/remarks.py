"""What a record's ``remarks`` say of its picture, one bit each. A note counts them in the end."""

#: The picture grew in width or in height.
ENLARGED = 1
#: The background shows through its transparent pixels.
FLATTENED = 2
#: It had more than 8 bits per channel, which were reduced to 8.
REDUCED = 4
