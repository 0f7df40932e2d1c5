"""How far a build is: a bar in terminals and notebooks, and a line in the log elsewhere."""

import logging
import re

import pytest

import memload


def build(folder, tmp_path, **options):
    return memload.build(folder, tmp_path / "out.bin", size=8, num_workers=0, **options)


def lines(caplog):
    return [message for message in caplog.messages if " left, " in message]


@pytest.mark.parametrize("progress", [None, False, True])
def test_without_a_terminal_lines_tell_rate_and_time_left(
    folder,
    tmp_path,
    progress,
    monkeypatch,
    caplog,
):
    (folder / "ant" / "empty.jpg").touch()
    monkeypatch.setattr("memload.building.progress._LINE_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "memload"):
        build(folder, tmp_path, progress=progress)
    shown = lines(caplog)
    assert len(shown) == (
        6 if progress is None else 0
    )  # one for each chunk, and the last one again
    if shown:
        pattern = r".*out\.bin: 3 of 13 done \(23%\), [\d,.]+ images/s, 00:\d\d left, 0 rejected"
        assert re.fullmatch(pattern, shown[0])
        assert "13 of 13 done (100%)" in shown[-1]
        assert shown[-1].endswith("00:00 left, 1 rejected")


def test_a_short_build_logs_no_line(folder, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "memload"):
        build(folder, tmp_path)
    assert caplog.messages
    assert not lines(caplog)
