"""What a check is."""

from dataclasses import dataclass
from typing import Literal

#: ``ok``; ``note`` for what could be better; ``bad`` for what is broken.
Mark = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Check:
    """What was found of one subject, and what to do about it."""

    subject: str
    mark: Mark
    finding: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.mark:4}  {self.subject:17}  {self.finding}{remedy}"
