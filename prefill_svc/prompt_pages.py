"""The pages of one prompt, in every KV group: taken when its first chunk is planned, all that it ever holds at once. Pure.

Behind a window a prompt holds fewer pages than it has: those that the window has left go back, and as long as more are to
come, as many are taken in their place in the same call. So a prompt that has begun never waits for pages.
"""

from collections.abc import Sequence

from engine.layout import GroupLayout, pages_for
from engine.pages import NULL_PAGE, PagePool


def most_pages(groups: Sequence[GroupLayout], tokens: int, step_tokens: int) -> list[int]:
    """Most pages that a prompt of `tokens` tokens holds at once in each group, with at most `step_tokens` of them in a step."""
    return [group.most_pages(tokens, step_tokens) for group in groups]


class PromptPages:
    """Pages of one holder; `tables`, one per group, have null pages where a window has left.

    gone: of each group, how many those are.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        groups: Sequence[GroupLayout],
        holder: str,
        tokens: int,
        step_tokens: int,
        found: tuple[list[int], ...],
    ) -> None:
        """Takes what `most_pages` says, less what the holder has found; the caller knows that there is enough."""
        self._pools = pools
        self._groups = groups
        self._holder = holder
        self._tokens = tokens
        self.tables = found
        self.gone = [table.count(NULL_PAGE) for table in found]
        for number, count in enumerate(most_pages(groups, tokens, step_tokens)):
            end = min(self.gone[number] + count, pages_for(tokens, groups[number].page_tokens))
            found[number].extend(pools[number].allocate(holder, end - len(found[number])))

    def slide(self, computed_tokens: int) -> None:
        """So many tokens are computed: what no later one sees goes back."""
        for number, (pool, group) in enumerate(zip(self._pools, self._groups, strict=True)):
            gone, table = self.gone[number], self.tables[number]
            left = group.first_page(computed_tokens) - gone
            if left <= 0:
                continue
            pool.drop_front(self._holder, left)
            table[gone : gone + left] = [NULL_PAGE] * left
            self.gone[number] = gone + left
            table += pool.allocate(self._holder, min(left, pages_for(self._tokens, group.page_tokens) - len(table)))

    def release(self) -> None:
        """Give everything back, once."""
        for pool in self._pools:
            pool.release(self._holder)
