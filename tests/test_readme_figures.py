"""The README: its numbers are settings, or come from results."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
#: Numbers that say what was measured, and not what came out.
SETTINGS = {
    *("200", "2", "16"),  # H200, and numbers of cores
    *("18", "50"),  # ResNet-18 and ResNet-50
    *("3.11", "2.4", "12.8"),  # versions
    *("10", "3", "224", "256", "352"),  # CIFAR-10, channels, sides
}


def test_other_numbers_are_settings():
    text = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->[^<]*<!---->|<!--.*?-->|\]\([^)]*\)", "", text)
    text = re.sub(r"^\|  \| disk(.+\n)+", "", text, flags=re.MULTILINE)  # what is arithmetic
    assert set(re.findall(r"\d+(?:[.,]\d+)*", text)) <= SETTINGS
