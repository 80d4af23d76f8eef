"""The text that scales and codes are measured on: prose, dialogue, figures, a list and some code.

What matters is not its content but that the largest keys and values over it are like those over other texts,
so it is varied, and long enough for each head to see different neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, Ints
from engine.batch import BatchBuilder, TextRow
from engine.kv_cache import KVCache
from engine.kv_scales import Extremes, KVScales
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from engine.text import Tokenizer

MAX_TOKENS = 1024
BLOCK_MULTIPLE = {"cuda": 256}  # so that every attention there can read the one block that the text takes

TEXT = """\
The ferry left the harbour at ten past six, when the fog had just begun to lift from the water. On \
the upper deck a woman in a green coat was reading a letter for the third time; beside her stood a \
crate of apples, two bicycles and a dog that belonged to nobody. "We shall be late," said the \
captain, "but not so late that anyone will write to the company about it." He had sailed this route \
for thirty-one years, through ice in February and through the long white evenings of June, and he \
still counted the lighthouses aloud as they went by.

Most of what we know about the island comes from its account books. In 1848 the village had 212 \
inhabitants, 40 cows and a single clock. The harvest of that year was poor: barley fell from 1,350 \
to 870 bushels, and the price of bread rose by almost 60 percent within five months. Nobody starved, \
because the herring came early. How do we know? A schoolteacher noted it in the margin, next to a \
drawing of the fish.

To make the soup you need the following:
- 500 g of potatoes, peeled and cut into cubes
- 2 onions and 3 cloves of garlic
- 1 litre of stock, a bay leaf, salt and black pepper
- a handful of parsley, chopped just before it is served
Fry the onions slowly until they are soft but not brown. Add everything else except the parsley, \
bring it to the boil, and let it simmer for 25 minutes. Taste it, and correct what is missing.

A program that finds the largest number in a list can be written in a few lines:

def largest(numbers):
    best = None
    for n in numbers:
        if best is None or n > best:
            best = n
    return best

It looks at every element once, so the time it takes grows in proportion to the length of the list. \
If the list is empty, the result is None, and whoever calls the function has to decide what that \
means.

Water boils at 100 degrees Celsius at sea level, but at about 93 degrees on a mountain 2,000 metres \
high, since the pressure of the air is lower there. The same law explains why a sealed pot cooks \
faster: the steam cannot escape, the pressure rises, and with it the temperature of the water. \
Engineers used this effect long before physicists could describe it. The first steam engines wasted \
more than ninety-nine parts of their heat in a hundred; each improvement was paid for in coal, iron \
and patience.

"Do you remember the house by the mill?" asked Ana. "Of course," her brother answered. "There was a \
walnut tree in front of it, and we were not allowed to climb it; so we climbed it every day." They \
laughed, then fell silent. Outside, a tram went past with all its windows lit. Neither of them had \
been back since the river was dammed and the valley disappeared, first the meadows, then the road, \
and last of all the roof of the old mill.

Questions for next week: Who owns the data? Which of the three proposals costs least to maintain? \
What happens if the contract ends before the work does? Please send your answers by Thursday, 14 \
March, 17:30, to the usual address.
"""


def calibration_ids(tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """The text as ids of a model, cut to what it can take."""
    return tokenizer.encode(TEXT, add_special=True)[: min(MAX_TOKENS, max_model_len)]


def read_text(
    ids: Sequence[int],
    decoder: Decoder,
    attention: AttentionBackend,
    spec: ModelSpec,
    to_device: Callable[[Ints], Tensor],
    *,
    every_logit: bool,
) -> KVCache:
    """Run a text through a decoder in one go, in a pool of its own, which is returned.

    ``spec`` gives the attention windows. ``every_logit``: every token goes through the output head, not only
    the last one. MemoryError if there is no room for the text's keys and values.
    """
    length = len(ids)
    multiple = BLOCK_MULTIPLE.get(decoder.device.type, 1)
    size = -(-length // multiple) * multiple
    kv = KVCache.allocate(
        decoder.spec, num_blocks=1, block_size=size, dtype=decoder.dtype, device=decoder.device
    )
    with torch.inference_mode():
        batch = BatchBuilder(size, 1).build([TextRow(list(ids), [0], num_new=length)])
        batch.fill()
        plan = attention.plan(batch.rows, kv, spec, to_device)
        tokens, positions, slots = map(to_device, (batch.ids, batch.positions, batch.slots))
        wanted = None if every_logit else to_device(batch.logit_tokens)
        decoder.forward(tokens, positions, slots, plan, kv, wanted)
    return kv


class Calibration:
    """What one decoder makes of the text with ``ids``: computed when it is first asked for.

    Call it while no step is computed. ``attention`` gives the backend to run with.
    """

    def __init__(
        self,
        ids: Sequence[int],
        decoder: Decoder,
        attention: Callable[[], AttentionBackend],
        to_device: Callable[[Ints], Tensor],
    ) -> None:
        self._ids = ids
        self._decoder = decoder
        self._attention = attention
        self._to_device = to_device
        self._extremes: Extremes | None = None

    def scales(self, storage: torch.dtype, spec: ModelSpec) -> KVScales:
        """Scales for keys and values in 8 bits, with the windows of ``spec``, kept until `forget`.

        Raises `KVScalesError` naming a head that yields none, and what `read` raises.
        """
        if self._extremes is None:
            if not self._ids:
                raise ValueError(
                    "a quantized KV cache needs a text to calibrate its scales with; none was given"
                )
            kv = self.read(spec, every_logit=False)
            with torch.inference_mode():
                self._extremes = Extremes.of(kv.k, kv.v)
        return self._extremes.scales(storage)

    def forget(self) -> None:
        """The weights or the windows have changed."""
        self._extremes = None

    def read(self, spec: ModelSpec, *, every_logit: bool) -> KVCache:
        """See `read_text`. ValueError if there is no text."""
        if not self._ids:
            raise ValueError("weights can only be guided by a text to calibrate with; none was given")
        return read_text(
            self._ids, self._decoder, self._attention(), spec, self._to_device, every_logit=every_logit
        )
