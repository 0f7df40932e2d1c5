"""Shares, the table and the plot, of lines that are given."""

from pathlib import Path
from typing import Any

import pytest

from memload import bench_report
from memload.bench_report import Line, Report, check_plot


def report(*lines: Line, **facts: Any) -> Report:
    known = {
        "path": "/a/b.bin",
        "samples": 12,
        "sampled": 12,
        "shape": [4, 5, 3],
        "dtype": "uint8",
        "batch_size": 8,
    }
    machine = {"cpu": "a CPU", "cores": 2}
    known |= {
        "rounds": 5,
        "seconds": 31.4,
        "machine": machine,
        "versions": {"torch": "2.0"},
        "notes": ["A note."],
    }
    return Report(known | facts, lines)


def test_the_share_is_the_median_of_each_rounds() -> None:
    line = Line.of("a", [1.0, 9.0, 4.0], "b", [2.0, 10.0, 4.0], 1_000_000_000)
    assert (line.images_s, line.limit_images_s, line.share, line.gb_s, line.rounds) == (
        4.0,
        4.0,
        0.9,
        4.0,
        3,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234, "0.1234"),
        (7.25, "7.25"),
        (123.44, "123.4"),
        (9999.6, "10,000"),
        (362449.0, "362,400"),
    ],
)
def test_a_rate_has_four_digits(value: float, text: str) -> None:
    assert bench_report._number(value) == text


def test_the_table_has_a_row_a_line_and_the_notes_below() -> None:
    measured = Line.of(
        "gather", [1000.0, 2000.0, 3000.0], "a copy", [4000.0, 4000.0, 4000.0], 1_000_000
    )
    text = report(measured, Line("feed dma", reason="no device")).text()
    assert text.splitlines() == [
        "b.bin: 12 samples of 4×5×3 uint8; batches of 8, medians of 5 rounds, 31 s in all",
        "a CPU, 2 cores; no GPU; torch 2.0",
        "",
        "          images/s  GB/s  share  of its limit, images/s",
        "gather       2,000     2   0.50  4,000  a copy",
        "feed dma         –     –         no device",
        "",
        "Share: the median of each round's rate over that round's limit.",
        "A note.",
    ]


def test_the_plot_has_a_bar_a_rate_whose_length_is_its_logarithm_and_a_mark_at_its_limit() -> None:
    lines = [Line.of("a", [rate] * 3, "most", [1000.0] * 3, 1) for rate in (10.0, 100.0)]
    picture = report(*lines, Line("none", reason="not here")).plot()
    rows = [
        [picture.getpixel((x, 84 + 34 * number + 12)) for x in range(picture.width)]
        for number in range(3)
    ]
    bars = [row.count((0x4C, 0x78, 0xA8)) for row in rows]
    assert bars[1] == pytest.approx(310, abs=3)  # of 620 pixels for 10 to 1,000
    assert bars[0] <= 1
    assert bars[2] == 0
    for row in rows[:2]:
        assert row[920] == (0, 0, 0)


def test_a_plot_in_a_folder_that_is_read_only_is_refused_and_one_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: str) -> None:  # as root may write to any folder
        raise PermissionError(13, "Permission denied")

    plot = tmp_path / "speed.png"
    check_plot(plot)
    assert not plot.exists()
    plot.write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"plot: expected .*Choose another"):
        check_plot((tmp_path / "folder").rename(tmp_path / "folder.png"))
    (tmp_path / "folder.png").rmdir()
    (tmp_path / "link.png").symlink_to("speed.png")
    (tmp_path / "new.png").symlink_to("none.png")
    for name in ("speed.png", "link.png", "new.png"):
        check_plot(tmp_path / name)
    assert plot.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "link.png", "new.png"}
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ValueError,
        match=r"plot: expected a file that can be written, found .*: Permission denied\.",
    ):
        check_plot(plot)
