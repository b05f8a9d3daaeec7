"""The records of a benchmark, in a file from which it can go on. Knows nothing about models."""

import json

from ..files import drop_half_line, whole_lines
from ..weights.config import shown


class Store:
    """All records so far, in memory and, with a folder, in its records.jsonl, by whole rounds.

    That file begins with a line of the settings they were made with. A line that a kill cut short
    is dropped.
    """

    def __init__(self, folder, settings, resume):
        self.records, self.settings, self.file = [], settings, folder and folder / "records.jsonl"
        if folder and folder.exists() and not resume and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; go on with --resume, or name another folder")
        if resume and self.file.is_file():
            self._read()

    def _read(self):
        try:
            lines = whole_lines(self.file).split("\n")[:-1]
            found, *rounds = map(json.loads, lines or [""])
            self.records = sum(rounds, [])
        except (ValueError, TypeError):
            raise ValueError(f"{self.file} is damaged; name another folder") from None
        different = []
        for key, value in self.settings.items():
            before = found.get(key) if isinstance(found, dict) else None
            if before != value:
                different.append(f"{key} {shown(before)}, not {shown(value)}")
        if different:
            raise ValueError(f"{self.file} was made with other settings: {'; '.join(different)}")
        drop_half_line(self.file)

    def add(self, records):
        self.records += records
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(json.dumps(self.settings) + "\n")
                file.write(json.dumps(records, ensure_ascii=False) + "\n")

    def of(self, target, temperature, weights=None):
        """The records of a target, by its name and, if given, the checksum of its weights."""
        wanted = (target, temperature)
        found = [r for r in self.records if (r["target"], r["temperature"]) == wanted]
        if weights and any(record["weights"] != weights for record in found):
            other = f"{self.file} has records of another {target}"
            raise ValueError(f"{other}, whose weights were different")
        return found
