"""What drift is told by: the measures of the data that the gate accepted last, a small file for each choice of data.

It lies beside the training state and is no output, for DVC removes those before a stage runs. It can only make the gate
refuse data, never change them.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from rlhf import anchors
from rlhf.data.gsm8k import SPLITS
from rlhf.data.suites import MEASURES, Profile
from rlhf.files import appearing
from rlhf.params import Data


def read(data: Data) -> Profile | None:
    """The profile of the data that the same choice gave last; None where there was none, or it cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(_place(data).read_bytes())
        if isinstance(found, dict) and {(s, *found[s]) for s in found} == {(s, *MEASURES) for s in SPLITS}:
            return found
    return None


def write(data: Data, profile: Profile) -> None:
    """Remembers the profile as accepted; says so where the disk refuses, for the data are in place by then."""
    place = _place(data)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with appearing(place) as written:
            written.write_text(json.dumps(profile, indent=2) + "\n")
    except OSError as error:
        print(f"prepare_data: {place} cannot be written ({error.strerror}): drift is not watched", file=sys.stderr)


def _place(data: Data) -> Path:
    """A file for each choice of data, whatever the revision on the hub and the gate's thresholds."""
    choice = data.model_dump(exclude={"max_overlap": True, "max_drift": True, "hub": {"revision"}})
    name = sha256(json.dumps(choice, sort_keys=True).encode()).hexdigest()[:12]
    return anchors.state_dir() / "prepare_data" / f"accepted-{name}.json"
