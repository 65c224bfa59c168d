"""The queries of the chart, ready to be asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).resolve().parents[2] / "charts" / "tandem" / "scaling" / "queries.yaml"


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series belong to one cell: label matchers of each pool. `window`: of rates, as Prometheus writes it. `quantile`: of
    inter-token times. `started`: share of a pool that is taken from which on waiting requests count for it. `cost`: window in
    which it is measured what a prompt token costs."""

    prefill: str
    decode: str
    router: str
    window: str = "1m"
    quantile: float = 0.95
    started: float = 0.5
    cost: str = "5m"

    def fill(self, query: str) -> str:
        """The query for these series."""
        words = {
            **{"{PREFILL}": f"{{{self.prefill}}}", "{DECODE}": f"{{{self.decode}}}"},
            **{"{ROUTER}": f"{{{self.router}}}", "{ROUTER,": f"{{{self.router},"},
            **{"[WINDOW]": f"[{self.window}]", "[COST]": f"[{self.cost}]"},
            **{"QUANTILE": f"{self.quantile:g}", "STARTED": f"{self.started:g}"},
        }
        for word, text in words.items():
            query = query.replace(word, text)
        return query


def read(scope: Scope) -> Mapping[str, Mapping[str, str]]:
    """Expressions by pool and name."""
    pools = yaml.safe_load(FILE.read_text())
    return {pool: {name: scope.fill(one["query"]) for name, one in queries.items()} for pool, queries in pools.items()}
