"""`make fuzz`: random models, configurations and draws, and the table of them in docs/fuzz.md.

`make fuzz ONLY=dense SEED=7` runs one try again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.soak.run import Catalogue, main

HEAD = """# Random models against transformers

`make fuzz` makes this table, in about an hour on two idle cores; `make test` has a few of its tries. Tries are
numbered from 0 and chance comes from the number alone: `make fuzz ONLY=dense SEED=7` runs one again. After 90 minutes
no try is begun any more: "17 of 30" are 17 that were made of 30 that were planned.

| `ONLY=` | what is tried | right where | tries | right | wrong | seconds |
| --- | --- | --- | ---: | ---: | ---: | ---: |
"""

FUZZ = Catalogue("tests.fuzz.catalogue", Path(__file__).parents[2] / "docs" / "fuzz.md", HEAD, seconds=5400)

if __name__ == "__main__":
    sys.exit(main(FUZZ, __doc__))
