"""All that is fuzzed. Whoever adds a door adds a target here."""

from tests.fuzz.http_door import DOOR
from tests.fuzz.services import SERVICES
from tests.fuzz.texts import TEXTS

TARGETS = (*TEXTS, *SERVICES, DOOR)
