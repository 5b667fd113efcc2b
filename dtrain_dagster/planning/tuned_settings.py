"""The file of settings that `dtrain tune` has measured or `dtrain search` has found, and their use by a training.

A file of `dtrain tune` changes how fast a training is, and so only some fields of ``training``. One of `dtrain search`
says what is trained: any field of ``training``, the model and the loss. A setting that a person states comes first. The
micro-batch and the accumulation are one setting: their product decides the training, and only its division was tuned.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dtrain_dagster.planning.check_job import data_of
from trainer.config import PARTS, ConfigError, DistributedTrainingConfig, JobConfig
from trainer.data.manifest import NoDatasetError
from trainer.storage.open import open_storage
from trainer.tuning.search_space import FIELDS, KNOBS, LAYOUT

SEARCH = "search"
"""The key of the evidence that names the search which has found the settings."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The content of a file of tuned settings."""

    source: str
    training: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``model`` and ``loss`` as a search has found them, with ``factory`` and ``args``."""

    @property
    def is_found(self) -> bool:
        return SEARCH in self.evidence

    def parts_for(self, job: JobConfig) -> dict[str, dict[str, Any]]:
        """Return the model and the loss that a search has varied. Raise `ConfigError` for a job that has neither those
        that it began from nor those that it has found."""
        for name in PARTS if self.is_found else ():
            here, before = asdict(job)[name], self.evidence.get(name)
            if here not in (before, self.parts.get(name, before)):
                raise ConfigError(
                    f"settings of {self.source} were searched from {name} {before!r}, and this training has {here!r}: "
                    "run `dtrain search` for this training, or leave the file out"
                )
        return self.parts

    def settings_for(self, job: JobConfig, stated: Collection[str]) -> tuple[dict[str, Any], list[str]]:
        """Return fields of ``training`` for a job that was configured without the file, and notes on them. ``stated``:
        fields that were given besides and stay. Raise `ConfigError` for another model or loss than was measured, and
        for another number of samples in a step."""
        used = {name: value for name, value in self.training.items() if name not in stated}
        if self.is_found:
            return used, self._notes(job, used)
        if any(name in stated for name in LAYOUT):
            used = {name: value for name, value in used.items() if name not in LAYOUT}
        if not self.evidence:
            return used, [f"{self.source} does not say what it was measured on"]
        wrong = [
            f"{name} {measured!r}, and this training has {here!r}"
            for name in ("model", "loss")
            if (measured := self.evidence.get(name)) != (here := asdict(getattr(job, name)))
        ]
        before = self.evidence.get("samples_per_rank")
        batch, parts = (getattr(job.training, name) for name in LAYOUT)
        if any(name in used for name in LAYOUT) and before != batch * parts:
            cut = " and ".join(f"training.{name} = {self.training.get(name)}" for name in LAYOUT)
            wrong.append(
                f"{before} samples per rank and step, and this training has {batch * parts}; to train with {cut}, "
                "state both"
            )
        if wrong:
            raise ConfigError(
                f"settings of {self.source} were measured with {'; with '.join(wrong)}: run `dtrain tune` for this "
                "training, or leave the file out"
            )
        return used, self._notes(job, used)

    def _notes(self, job: JobConfig, used: dict[str, Any]) -> list[str]:
        dataset_id, words = job.dataset.dataset_id, []
        if dataset_id is None:
            with contextlib.suppress(NoDatasetError):  # reported better where the data is read
                dataset_id = data_of(job).dataset_id
        now = {"dataset_id": dataset_id, "world_size": job.training.world_size}
        if self.is_found:
            made = [name for name in self.training if name not in used]
            words += [f"settings of {self.source}: training.{name} is used as stated, not as found" for name in made]
        if used and not self.is_found and not self.evidence.get("complete", True):
            words.append(
                f"settings of {self.source} are of a search that ended early: they were not compared with the "
                "configuration in the end, and may be no faster; tune again, with more --seconds"
            )
        verb = "found" if self.is_found else "measured"
        return words + [
            f"settings of {self.source} were {verb} with {name} {self.evidence.get(name)}, and this training has "
            f"{value}: its figures may differ"
            for name, value in now.items()
            if self.evidence.get(name) != value
        ]


def read_tuned(path: str) -> Tuned:
    """Return the settings of a file, local or in a storage. Raise `ConfigError` for one that cannot be used."""
    if "://" not in path:
        path = os.path.abspath(path)  # which says where it was looked for, in a code server as well
    folder, slash, name = path.rpartition("/")
    try:
        document = json.loads(open_storage(folder or slash or ".").read(name))
    except FileNotFoundError:
        raise ConfigError(
            f"settings {path}: there is no such file; `dtrain tune` and `dtrain search` write one"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"settings {path} cannot be read: {error}") from None
    training = document.get("training") if isinstance(document, dict) else None
    if not isinstance(training, dict):
        raise ConfigError(f'settings {path} must be a JSON object with "training" in it, as `dtrain tune` writes it')
    evidence = document.get("evidence") or {}
    if not isinstance(evidence, dict):
        raise ConfigError(f'settings {path}: "evidence" is not a JSON object; leave it out or tune again')
    is_found = SEARCH in evidence
    parts = {name: document[name] for name in PARTS if is_found and name in document}
    known = (
        [item.name for item in fields(DistributedTrainingConfig)]
        if is_found
        else [knob for knob in KNOBS if knob in FIELDS]
    )
    wrong = sorted(f"{key!r}" for key in document.keys() - {"training", "evidence", *parts})
    wrong += sorted(f"'training.{key}'" for key in training if key not in known)
    wrong += [f"{name!r}" for name, part in parts.items() if not isinstance(part, dict) or "factory" not in part]
    if wrong and is_found:
        raise ConfigError(
            f"settings {path}: {', '.join(wrong)} is not something that `dtrain search` writes; use the file as it was"
        )
    if wrong:
        raise ConfigError(
            f"settings {path}: {', '.join(wrong)} cannot be set by such a file, only these of training: "
            f"{', '.join(known)}; give others with --set or in job.json"
        )
    if not is_found and sum(name in training for name in LAYOUT) == 1:
        both = " and ".join(f"training.{name}" for name in LAYOUT)
        raise ConfigError(
            f"settings {path}: one of {both} is missing: both are needed to define a step; add it, or tune again"
        )
    return Tuned(path, training, evidence, parts)
