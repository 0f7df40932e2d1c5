"""Generate JPEGs that resemble photographs, for demonstrations, tests and benchmarks.

For decoders and resizers they are like photographs: their power spectrum falls off in the same way,
detail is spread unevenly, and sizes, bytes for each pixel and decoding times are those of ImageNet.
"""

import argparse
import colorsys
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Palette = tuple[
    float, float, float, float
]  # hue (0 to 1) of the ground, of the sky, of stones; saturation
# Sorted as folders are, so that a class's place here is its index in training.
PALETTES: dict[str, Palette] = {
    "amber": (0.12, 0.10, 0.08, 0.80),
    "basalt": (0.60, 0.58, 0.62, 0.12),
    "cedar": (0.05, 0.16, 0.03, 0.50),
    "dune": (0.10, 0.57, 0.09, 0.40),
    "ember": (0.00, 0.06, 0.02, 0.75),
    "fjord": (0.58, 0.56, 0.64, 0.70),
    "glade": (0.28, 0.55, 0.22, 0.60),
    "heath": (0.87, 0.60, 0.92, 0.40),
    "iris": (0.73, 0.70, 0.14, 0.55),
    "jade": (0.45, 0.48, 0.40, 0.60),
}


def _noise(
    rng: np.random.Generator, width: int, height: int, channels: int, finest: float
) -> np.ndarray:
    """Return noise, float32 (channels, height, width). `finest` is the weight of its last octave.

    Its power falls off a little more slowly than 1/f². The edges in a scene compensate for that.
    """
    field = np.zeros((channels, 1, 1), np.float32)
    for octave in range(math.ceil(math.log2(max(width, height, 6) / 3)), -1, -1):
        size = (-(-width >> octave) or 1, -(-height >> octave) or 1)
        # Add each octave at its own size, then enlarge the sum: this costs 4/3 of one enlargement.
        grain = rng.standard_normal((channels, size[1], size[0]), np.float32)
        field = _enlarged(field, size) + grain * np.float32(0.9**octave if octave else finest)
    return field


def _enlarged(field: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    planes = [Image.fromarray(plane).resize(size, Image.Resampling.BICUBIC) for plane in field]
    return np.stack([np.asarray(plane) for plane in planes])


def _colour(hue: float, saturation: float, value: float) -> tuple[int, ...]:
    return tuple(
        round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, min(saturation, 1), value)
    )


def _scene(
    rng: np.random.Generator, width: int, height: int, palette: Palette
) -> tuple[Image.Image, ...]:
    """Return a smooth scene with sharp edges (RGB), and how rough each part of it is (L)."""
    wide, high = (
        2 * width,
        2 * height,
    )  # drawn at twice the size, then averaged: edges are anti-aliased
    ground, air, stone = rng.normal(palette[:3], 0.015).tolist()
    rich, day = palette[3], rng.uniform(0.65, 1.0)
    corners = [
        _colour(air, rich * rng.uniform(0.3, 0.9), day * value) for value in (0.8, 0.8, 1, 1)
    ]
    sky = Image.fromarray(np.array(corners, np.uint8).reshape(2, 2, 3))
    scene = sky.resize((wide, high), Image.Resampling.BICUBIC)
    rough = Image.new("L", scene.size, int(rng.integers(5, 50)))
    paint, level = ImageDraw.Draw(scene), ImageDraw.Draw(rough)

    for near in np.linspace(
        0.1, 1, int(rng.integers(2, 6))
    ):  # far hills are pale and smooth, near ones not
        line = _noise(rng, 64, 1, 1, 0.3)[0, 0] * 0.045 + rng.normal(0.3 + 0.4 * near, 0.05)
        crest = np.stack([np.linspace(0, wide, 64), line * high], axis=1).ravel().tolist()
        tone = _colour(
            rng.normal(ground, 0.02), rich * (0.5 + 0.7 * near), day * (0.85 - 0.5 * near)
        )
        paint.polygon([*crest, wide, high, 0, high], fill=tone)
        level.polygon([*crest, wide, high, 0, high], fill=int(60 + 150 * near))

    if rng.random() < 0.4:  # a shallow depth of field: what is behind the stones is out of focus
        scene, rough = (
            scene.filter(ImageFilter.BoxBlur(high / 100)),
            rough.point(lambda value: value // 3),
        )
        paint, level = ImageDraw.Draw(scene), ImageDraw.Draw(rough)

    for foot in np.sort(rng.uniform(0.6, 1.05, int(rng.integers(2, 8)))).tolist():
        size = min(wide, high) * (0.6 * foot - 0.3) * rng.uniform(0.25, 0.8)
        flat, tint, value = (
            rng.uniform(0.6, 1.0),
            rng.normal(stone, 0.03),
            day * rng.uniform(0.6, 1.0),
        )
        x, y = rng.uniform(0.05, 0.95) * wide, foot * high - size * flat
        shadow = (x - 0.9 * size, y + 0.5 * size * flat, x + 1.5 * size, y + 1.1 * size * flat)
        paint.ellipse(shadow, fill=_colour(ground, rich, day * 0.15))
        for step in np.linspace(1, 0.04, 32).tolist():  # lit from the upper left
            cx, cy, rx = (
                x - 0.35 * size * (1 - step),
                y - 0.4 * size * flat * (1 - step),
                size * step,
            )
            tone = _colour(tint, rich * (0.5 + 0.5 * step), value * (1 - 0.72 * step**1.5))
            paint.ellipse((cx - rx, cy - rx * flat, cx + rx, cy + rx * flat), fill=tone)
        level.ellipse(
            (x - size, y - size * flat, x + size, y + size * flat), fill=int(rng.integers(30, 220))
        )

    tones = [_colour(rng.normal(ground, 0.03), rich, day * v) for v in np.linspace(0.15, 0.9, 16)]
    for foot in np.sort(rng.random(int(rng.integers(0, 500)))).tolist():  # blades of grass
        x, root, tall = (
            rng.random() * wide,
            (0.75 + 0.35 * foot) * high,
            (0.04 + 0.2 * foot**2) * high,
        )
        tip = (x + rng.uniform(-0.5, 0.5) * tall, root - rng.uniform(0.3, 1.3) * tall)
        paint.line(
            (x, root, *tip), fill=tones[rng.integers(16)], width=1 + int(high / 250 * (0.3 + foot))
        )
    return scene.reduce(2), rough.reduce(2)


def photograph(
    rng: np.random.Generator, width: int, height: int, *, palette: Palette = PALETTES["glade"]
) -> Image.Image:
    """Return an RGB picture (uint8) of hills under a sky, with stones and grass in front.

    `palette` holds hues and a saturation, 0 to 1, as PALETTES does. The same state of `rng` gives the same
    picture; on another processor a few samples may differ by one, as NumPy's exponential does.
    """
    scene, rough = (np.asarray(image, np.float32) for image in _scene(rng, width, height, palette))
    # Detail is crowded in some places of a photograph and absent from others.
    (patches,) = _enlarged(_noise(rng, -(-width // 16), -(-height // 16), 1, 0.5), (width, height))
    rough = (rough * np.exp(0.3 * patches) * np.float32(rng.lognormal(0.3, 0.5) / 255)).clip(0, 1.2)
    light = np.exp(
        0.9 * np.tanh(0.42 * rough * _noise(rng, width, height, 1, rng.uniform(0.6, 1.5))[0])
    )
    # Eyes and sensors resolve color less finely than brightness: half the size is enough for its texture.
    tints = _enlarged(_noise(rng, -(-width // 2), -(-height // 2), 2, 0.5), (width, height))
    warm, magenta = 0.04 * rough * tints[0], 0.02 * rough * tints[1]
    gains = (1 + warm + magenta, 1 - magenta, 1 + magenta - warm)
    sensor = np.float32(rng.uniform(0.5, 2.5)) * rng.standard_normal((height, width), np.float32)
    # Highlights approach white as they do on film, without being clipped.
    planes = [
        265 * (1 - np.exp(scene[..., i] * light * gains[i] / -150)) + sensor for i in range(3)
    ]
    return Image.merge(
        "RGB", [Image.fromarray(plane.clip(0, 255).astype(np.uint8)) for plane in planes]
    )


def _size(rng: np.random.Generator) -> tuple[int, int]:
    """Return (width, height) in pixels, spread as ImageNet's are: the longer side is 500 for most."""
    long = (
        500 if rng.random() < 0.65 else int(np.clip(rng.lognormal(math.log(420), 0.55), 96, 1600))
    )
    short = round(long * rng.choice([3 / 4, 2 / 3, rng.uniform(0.6, 1)], p=[0.55, 0.2, 0.25]))
    return (long, short) if rng.random() < 0.74 else (short, long)


def write_folder(
    folder: str | Path,
    count: int,
    *,
    classes: int = 10,
    seed: int = 0,
    size: tuple[int, int] | None = None,
) -> list[Path]:
    """Write `count` JPEGs as folder/<class>/<number>.jpg, to each class in turn. Return their paths.

    Picture i depends only on `seed`, `classes`, `size` and i, so a larger `count` adds to a smaller one.
    `size` is (width, height) in pixels. By default sizes vary like those of ImageNet: 500 × 375 in the
    median, 96 to 1600 on the longer side. Classes are named after PALETTES, then "amber_2" and so on.
    """
    paths = []
    for number in range(count):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
        again, place = divmod(number % classes, len(PALETTES))
        name, (*hues, rich) = list(PALETTES.items())[place]
        # The golden ratio of a turn, so that a palette that returns has other hues each time.
        ground, air, stone = (hue + 0.618 * again for hue in hues)
        path = Path(folder) / (f"{name}_{again + 1}" if again else name) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = photograph(rng, *(size or _size(rng)), palette=(ground, air, stone, rich))
        sampling = "4:2:0" if rng.random() < 0.75 else "4:4:4"
        picture.save(path, quality=int(rng.integers(91, 97)), subsampling=sampling)
        paths.append(path)
    return paths


def main() -> None:
    """Write a folder of pictures from the command line."""
    parser = argparse.ArgumentParser(description="Write photograph-like JPEGs, one folder a class.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    for name, default in (("--count", 400), ("--classes", 10), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    paths = write_folder(args.folder, args.count, classes=args.classes, seed=args.seed)
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(f"{len(paths)} pictures of {args.classes} classes, {size:.1f} MB, in {args.folder}")


if __name__ == "__main__":
    main()
