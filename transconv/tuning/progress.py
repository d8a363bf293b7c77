"""Progress of a run: a bar on a terminal, a line from time to time in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

EVERY_S = 20.0


class Progress:
    """Counts steps of a total that may grow."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0
        self.start = self.last = time.monotonic()
        self.bar = tqdm(total=total, unit=unit) if sys.stderr.isatty() else None

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.update()
        elif now - self.last > EVERY_S:
            self.last = now
            self.say(f"... {self.done} of {self.total} {self.unit}s, {now - self.start:.0f} s")

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
