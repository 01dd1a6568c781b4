"""The pace of prompts beside the decode batch, which share the time: when one is computed, how many tokens at once.

A prompt that takes T alone, beside a decode batch whose step takes d, shall be there soon, and the mean gap between
decoded tokens until then shall stay below stretch x d. If prompts get (stretch - 1) d of time for each decode step,
then over n steps the mean gap is d + (stretch - 1) d, and the prompt is there after T + T / (stretch - 1): with a
stretch of 2 after 2 T, with gaps of 2 d.

That holds only where the chunks together take hardly longer than T. On a CPU they do not if they are small: weights of
4 bits are multiplied by a few tokens one by one, and by many at once, and a chunk that fits into d takes a multiple of
its share of T. So chunks are as long as they have to be to cost hardly more a token than the longest, and the time for
one is saved up before, by steps without any. `most` bounds the longest gap.

What steps cost is learned from the steps themselves: machine, model and decode batch decide, and all of them may
change. What a chunk costs is known at the lengths that were computed, of each power of two the last ones, and taken as
linear between them. A longer one is tried as long as the last try paid; untried, it is taken to cost as much a token as
the longest known.
"""

_NEW, _NEW_CHUNK = 0.25, 0.5
"""The share of the newest step in what is known of decode steps, and of chunks, which are fewer and longer."""
_AIM = 0.86
"""Of the time that prompts may have: steps wander, and a prompt's later tokens cost more than those learned from."""
_HARDLY = 1.15
"""So much more may a token of a chunk cost than one of the cheapest chunk known."""
_PAYS, _LONGER = 0.9, 4
"""A chunk so many times as long is tried where the last one's tokens cost less than that share of those before."""


class Pace:
    """Learns from steps; says how many tokens of prompts go into the next.

    stretch  the mean time of a step while prompts wait, as a multiple of one without; above 1
    """

    def __init__(self, stretch: float):
        self.stretch = stretch
        self._decode_s: float | None = None
        self._chunks: dict[int, tuple[float, float]] = {}  # by log2 of its length: length and seconds
        self._saved_s = 0.0

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn that a step with so many decoding sequences and so many tokens of prompts took so long."""
        chunk_s = seconds
        if num_decoding and not num_prompt_tokens:
            self._decode_s, chunk_s = _moved(self._decode_s, seconds, _NEW), 0.0
        elif num_decoding:
            chunk_s = max(seconds - (self._decode_s or 0.0), 0.05 * seconds)
        if num_prompt_tokens:
            size = num_prompt_tokens.bit_length() - 1
            length, known_s = self._chunks.get(size, (None, None))
            self._chunks[size] = (
                _moved(length, num_prompt_tokens, _NEW_CHUNK),
                _moved(known_s, chunk_s, _NEW_CHUNK),
            )
        if num_decoding:
            self._saved_s += self._share_s - chunk_s

    def chunk(self, most: int, pending: int) -> int:
        """Tokens of prompts beside the next decode batch: at most `most`, of `pending` that wait; or none."""
        if not pending:
            self._saved_s = 0.0  # what nobody waited for is not owed
            return 0
        if self._decode_s is None:
            return 0  # a step without prompts tells what the decode batch needs
        if not self._chunks:
            return min(most, pending)
        length = min(self._length(most), pending)
        cost_s = self._cost_s(length)
        self._saved_s = min(self._saved_s, cost_s)
        there_s = self._saved_s + self._share_s
        if there_s < cost_s:
            return 0
        longest = max(self._chunks.values())
        if there_s < longest[1]:
            return length
        return max(length, min(most, pending, int(there_s / longest[1] * longest[0])))  # there is time for more

    @property
    def _share_s(self) -> float:
        """Seconds that prompts get of a decode step."""
        return _AIM * (self.stretch - 1) * (self._decode_s or 0.0)

    def _length(self, most: int) -> int:
        """A chunk's length: the shortest whose tokens cost hardly more than the cheapest known; or a longer try."""
        known = sorted((length, cost_s / length) for length, cost_s in self._chunks.values())
        longest, token_s = known[-1]
        paid = len(known) < 2 or token_s < _PAYS * known[-2][1]
        if paid and 1.5 * longest <= most:
            return min(_LONGER * int(longest), most)
        cheapest = min(token_s for _, token_s in known)
        return min(most, next(int(length) for length, token_s in known if token_s <= _HARDLY * cheapest))

    def _cost_s(self, length: int) -> float:
        """A chunk's cost: linear between lengths known; below all of them twice in proportion, no more than they."""
        known = sorted(self._chunks.values())
        (first, first_s), (last, last_s) = known[0], known[-1]
        if length <= first:
            return first_s * min(2 * length / first, 1.0)
        if length >= last:
            return last_s * length / last
        place = next(place for place, (other, _) in enumerate(known) if other >= length)
        (below, below_s), (above, above_s) = known[place - 1], known[place]
        return below_s + (above_s - below_s) * (length - below) / (above - below)


def _moved(known: float | None, new: float, share: float) -> float:
    return new if known is None else known + share * (new - known)
